"""A live server on a script checkpoint, and short ways to ask it: what the field reports are tested with.

The script model emits a wanted text through the whole engine; its MTP module drafts the right successors, so that
blocks of up to eight tokens are accepted. Tests pad a script by 0..k pieces, which puts the event under test on
every position of a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import openai

import soloist.engine.build
from live import Live, serving
from script_model import Piece, build_script
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.settings import resolve

ASK = [{"role": "user", "content": "?"}]
PADS: list[Piece] = [f"{chr(0x4E00 + i)}".encode() for i in range(16)]  # one distinct three-byte piece each
OFF = {"enable_thinking": False}
Script = Callable[..., Live]


@contextlib.contextmanager
def script_servers(root: Path) -> Iterator[Script]:
    """`start(pieces, pad=2, **knobs)`: a live server on a checkpoint that answers with these pieces, until the end."""
    with contextlib.ExitStack() as stack:
        count = 0

        def start(answer: list[Piece], pad: int = 0, end: Piece | None = "<|im_end|>", **knobs: str) -> Live:
            nonlocal count
            directory = build_script(root / f"m{count}", [*PADS[:pad], *answer], end=end)
            count += 1
            given = {"max_len": "2048", "max_seqs": "2", "threads": "1", "spec": "mtp", **knobs}
            if given["spec"] == "mtp":  # always the whole block, whatever a step costs
                given = {"draft_tokens": "7", "block_rule": "saturated", "tree": "0", **given}
            engine = soloist.engine.build.build_engine(resolve({"model": str(directory), **given}, {}, {}))
            stack.callback(engine.close)
            tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
            return stack.enter_context(serving(engine, tokenizer, template, defaults={"temperature": 0.0}))

        yield start


def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)


def whole(live: Live, **fields):
    return client(live).chat.completions.create(**{"model": "demo", "messages": ASK, **fields})


def streamed(live: Live, **fields):
    """(content, reasoning, arguments per call, finish reason, log-probability entries)."""
    content, reasoning, calls, finish, entries = "", "", {}, None, []
    for chunk in client(live).chat.completions.create(**{"model": "demo", "messages": ASK, "stream": True, **fields}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
            entries += choice.logprobs.content if choice.logprobs else []
            for call in choice.delta.tool_calls or []:
                calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
    return content, reasoning, calls, finish, entries


def prompts_of(live: Live) -> list[list[int]]:
    """The prompts that reach the engine from now on, as they come."""
    seen: list[list[int]] = []
    submit = live.engine.submit

    def recorded(request) -> None:
        seen.append(list(request.prompt))
        submit(request)

    live.engine.submit = recorded
    return seen


def drafts_were_accepted(reply) -> bool:
    return reply.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
