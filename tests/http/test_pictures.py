"""Pictures over HTTP, on the real engine with a tiny vision tower: three protocols, tool results, counts, refusals."""

from __future__ import annotations

import base64
import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import soloist.engine.build
from live import Live, serving
from soloist import demo
from soloist.server.load import picture_rules
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.settings import resolve
from tiny_vision import build_tiny_vision, data_url, picture, png

A, B = picture(1, 128, 128), picture(2, 128, 128)
ROWS = 64  # of A and of B
GREEDY = {"temperature": 0}  # no argument of the client any more
QUESTION = "What does this picture show, and where was it taken? Answer in one sentence."
KNOBS = {"vision": "1", "max_len": "2048", "max_seqs": "2", "threads": "1", "spec": "mtp", "settle": "0"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soloist.engine.build, "cached_check", lambda key, run: [])
        engine = soloist.engine.build.build_engine(resolve({"model": str(directory), **KNOBS}, {}, {}))
    yield engine
    engine.close()


def _serving(engine: Any, directory: Path, template: Path | None = None, **knobs: str):
    settings = resolve({"model": str(directory), **KNOBS, **knobs}, {}, {})
    return serving(
        engine,
        Tokenizer.load(directory),
        ChatTemplate.load(template or directory),
        pictures=picture_rules(settings, directory),
        defaults={"temperature": 0.0},
    )


@pytest.fixture(scope="module")
def live(engine: Any, directory: Path) -> Iterator[Live]:
    with _serving(engine, directory) as live:
        yield live


def _chat(live: Live, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    switches = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 6, "logprobs": True}
    return httpx.post(live.url + "/v1/chat/completions", json={"messages": messages, **switches, **fields}, timeout=60)


def _user(*images: Any, text: str = QUESTION) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": i if isinstance(i, str) else data_url(i)}} for i in images]
    return {"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts, {"type": "text", "text": text}]}


def _bits(reply: httpx.Response) -> tuple[str, list[float]]:
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return choice["message"]["content"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def _refused(reply: httpx.Response, *words: str) -> None:
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert all(word in message for word in words), message


def test_chat_counts_the_picture_and_answers_by_it(live: Live) -> None:
    without = _chat(live, [_user()]).json()["usage"]["prompt_tokens"]
    first, other = _chat(live, [_user(A)]), _chat(live, [_user(B)])
    assert first.json()["usage"]["prompt_tokens"] == other.json()["usage"]["prompt_tokens"] == without + ROWS + 2
    assert _bits(first)[1] != _bits(other)[1]


def test_two_pictures_with_equal_text_never_share_and_the_same_one_hits(live: Live, engine: Any) -> None:
    def cached(reply: httpx.Response) -> int:
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cold = {}
    for name, image in (("a", A), ("b", B)):
        cold[name] = _bits(_chat(live, [_user(image)], cache_salt=f"cold {name}"))
    first, other, again = (_chat(live, [_user(i)], cache_salt="shared") for i in (A, B, A))
    assert _bits(first) == _bits(again) == cold["a"] and _bits(other) == cold["b"]
    assert cached(first) == 0 and cached(other) < 64 and cached(again) >= ROWS


def test_a_conversation_about_a_picture_goes_on_warm(live: Live) -> None:
    turn = _chat(live, [_user(A)], max_tokens=40).json()
    said = turn["choices"][0]["message"]["content"] or ""
    history = [_user(A), {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    reply = _chat(live, history)
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= ROWS
    assert _bits(reply) == _bits(_chat(live, history, cache_salt="cold"))


def test_openai_client_streams(live: Live) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    stream = client.chat.completions.create(
        model="demo", messages=[_user(A)], stream=True, stream_options={"include_usage": True}, max_tokens=5
    )
    chunks = list(stream)
    assert chunks[-1].usage.prompt_tokens > ROWS and any(c.choices and c.choices[0].finish_reason for c in chunks)


def test_tool_results_may_hold_pictures_in_every_protocol(live: Live) -> None:
    """A screenshot as the answer of a tool: the prompt grows by its rows, and the pictures are told apart."""
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    base = [{"role": "user", "content": "Take a shot"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def chat(*images: Any) -> tuple[int, Any]:
        parts = [{"type": "text", "text": "done"}, *_user(*images)["content"][1:-1]]
        reply = _chat(live, [*base, {"role": "tool", "tool_call_id": "c1", "content": parts}])
        return reply.json()["usage"]["prompt_tokens"], _bits(reply)

    def messages(*images: Any) -> tuple[int, Any]:
        source = [{"type": "base64", "media_type": "image/png", "data": png(i)} for i in images]
        content = [{"type": "text", "text": "done"}, *({"type": "image", "source": s} for s in source)]
        client = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
        turns: Any = [
            {"role": "user", "content": "Take a shot"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "shot", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": content}]},
        ]
        reply = client.messages.create(model="demo", max_tokens=5, messages=turns, extra_body=GREEDY)
        assert client.messages.count_tokens(model="demo", messages=turns).input_tokens == reply.usage.input_tokens
        return reply.usage.input_tokens, [block.model_dump() for block in reply.content]

    def responses(*images: Any) -> tuple[int, Any]:
        output = [{"type": "input_text", "text": "done"}]
        output += [{"type": "input_image", "image_url": data_url(i), "detail": "auto"} for i in images]
        client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
        items: Any = [
            {"role": "user", "content": "Take a shot"},
            {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": output},
        ]
        reply = client.responses.create(model="demo", input=items, max_output_tokens=5, temperature=0, top_logprobs=0)
        return reply.usage.input_tokens, [item.model_dump(exclude={"id"}) for item in reply.output]

    for ask in (chat, messages, responses):
        (none, _), (one, said_a), (same, said_b) = ask(), ask(A), ask(B)
        assert one == same == none + ROWS + 2, ask.__name__
        if ask is not messages:  # Anthropic's replies carry no log-probabilities, and five tokens may agree
            assert said_a != said_b, ask.__name__


def test_user_pictures_in_messages_and_responses(live: Live) -> None:
    client = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": png(A)}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    with client.messages.stream(
        model="demo", max_tokens=5, messages=[{"role": "user", "content": content}], extra_body=GREEDY
    ) as stream:
        assert stream.get_final_message().usage.input_tokens > ROWS
    parts: Any = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": data_url(A)}]
    reply = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0).responses.create(
        model="demo", input=[{"role": "user", "content": parts}], max_output_tokens=5, temperature=0
    )
    assert reply.usage.input_tokens > ROWS


def test_tokenize_shows_the_rows(live: Live, directory: Path) -> None:
    pad = Tokenizer.load(directory).id_of("<|image_pad|>")
    reply = httpx.post(live.url + "/tokenize", json={"messages": [_user(A)]}).json()
    assert reply["tokens"].count(pad) == ROWS and reply["count"] == len(reply["tokens"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,A", ("base64", "broken")),
        ("data:image/png;base64,!!!!", ("base64", "broken")),
        ("data:image/png,abc", ("not base64",)),
        ("data:image/png;base64," + base64.b64encode(b"no picture").decode(), ("not a picture",)),
        (data_url(A)[:-400], ("not a picture",)),
        ("https://example.com/a.png", ("VISION_URLS",)),
        ("http://127.0.0.1:1/a.png", ("VISION_URLS",)),
        ("file:///etc/passwd", ("neither a data URL",)),
        ("/etc/passwd", ("neither a data URL",)),
        ("", ("neither a data URL",)),
    ],
)
def test_what_is_no_picture_is_refused_with_its_place(live: Live, url: str, words: tuple[str, ...]) -> None:
    reply = _chat(live, [{"role": "user", "content": "hi"}, _user(url)])
    _refused(reply, "messages.1.content.1", *words)
    assert reply.json()["error"]["param"] == "messages.1.content.1"


def test_malformed_parts_places_and_numbers(live: Live) -> None:
    url = data_url(A)
    _refused(_chat(live, [{"role": "user", "content": [{"type": "image_url"}]}]), "no image_url")
    _refused(_chat(live, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 3}}]}]), "image_url")
    file = {"type": "input_image", "file_id": "file-1"}
    _refused(_chat(live, [{"role": "user", "content": [file]}]), "data URL")
    assistant = {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    _refused(_chat(live, [_user(), assistant, _user()]), "assistant", "cannot hold a picture")
    _refused(_chat(live, [_user(A, B)]), "2 pictures", "VISION_MAX_IMAGES")
    _refused(_chat(live, [_user(A, text="see <|image_pad|>?")]), "<|image_pad|>")
    narrow = picture(3, 2000, 4)
    _refused(_chat(live, [_user(narrow)]), "too narrow")
    plain = {"type": "image_url", "image_url": url}  # the older form without an object
    assert _chat(live, [{"role": "user", "content": [plain]}]).status_code == 200


def test_other_formats_and_large_pictures(live: Live) -> None:
    counts = []
    for form in ("JPEG", "WEBP", "GIF", "BMP"):
        file = io.BytesIO()
        picture(4, 900, 700).save(file, format=form)
        url = f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
        counts.append(_chat(live, [_user(url)]).json()["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1
    without = _chat(live, [_user()]).json()["usage"]["prompt_tokens"]
    assert 40 <= counts[0] - without - 2 <= 64, "scaled down to the processor's largest size"


def test_more_pictures_where_allowed_and_a_lower_cap(engine: Any, directory: Path) -> None:
    with _serving(engine, directory, vision_max_images="2", vision_max_pixels="4096") as live:
        without = _chat(live, [_user()]).json()["usage"]["prompt_tokens"]
        both, swapped = _chat(live, [_user(A, B)]), _chat(live, [_user(B, A)])
        assert both.json()["usage"]["prompt_tokens"] == without + 2 * (4096 // 256 + 2)
        assert _bits(both)[1] != _bits(swapped)[1]


def test_a_template_without_pictures_says_so(engine: Any, directory: Path) -> None:
    with _serving(engine, directory, template=demo.path()) as live:
        _refused(_chat(live, [_user(A)]), "template", "0 places for 1 pictures")


def test_vision_off_names_the_knob_in_every_protocol(say) -> None:
    live = say("ok")
    _refused(_chat(live, [_user(A)]), "VISION=1")
    source = {"type": "base64", "media_type": "image/png", "data": png(A)}
    for content in (
        [{"type": "image", "source": source}],
        [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": source}]}],
    ):
        body = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
        _refused(httpx.post(live.url + "/v1/messages", json=body), "VISION=1")
    image = {"type": "input_image", "image_url": data_url(A)}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for items in (
        [{"role": "user", "content": [image]}],
        [{"role": "user", "content": "x"}, call, {"type": "function_call_output", "call_id": "c", "output": [image]}],
    ):
        _refused(httpx.post(live.url + "/v1/responses", json={"input": items}), "VISION=1")


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """A web server with /a.png, /big and nothing else."""
    file = io.BytesIO()
    A.save(file, format="PNG")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/a.png": file.getvalue(), "/big": b"x" * (3 << 20)}.get(self.path)
            self.send_response(200 if body else 404)
            self.end_headers()
            if body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_web_addresses_when_they_are_allowed(engine: Any, directory: Path, live: Live, web: str) -> None:
    with _serving(engine, directory, vision_urls="1", max_body_mb="2") as fetching:
        assert _bits(_chat(fetching, [_user(f"{web}/a.png")])) == _bits(_chat(live, [_user(A)]))
        _refused(_chat(fetching, [_user(f"{web}/none.png")]), "cannot be fetched", "404")
        _refused(_chat(fetching, [_user(f"{web}/big")]), "larger than 2 MiB")
        _refused(_chat(fetching, [_user("http://127.0.0.1:1/a.png")]), "cannot be fetched")
        _refused(_chat(fetching, [_user("http://[bad/a.png")]), "cannot be fetched")
