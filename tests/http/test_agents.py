"""Requests as coding agents and chat interfaces send them, written by hand from their public documentation."""

from __future__ import annotations

import json

import httpx
import pytest

from soloist.server.prompting import thinking_left_open

EOS = 16362
READ = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "limit": {"type": ["integer", "null"]}},
    "required": ["path"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
CALL = (
    "<tool_call>\n<function=read>\n<parameter=path>\nsrc/main.py\n</parameter>\n"
    "<parameter=limit>\n10\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture
def agent(say, tokenizer):
    """Calls `read` when it is offered and nothing was read yet, else answers."""

    def script(request):
        prompt = tokenizer.decode(request.prompt)
        text = CALL if '"name": "read"' in prompt and "<tool_response>" not in prompt else "All done."
        lead = "Let me see.\n</think>\n\n" if thinking_left_open(tokenizer, request.prompt) else ""
        return [*tokenizer.encode(lead + text), EOS]

    return say(script, block=(1, 16))


def events(live, path, body, headers=None):
    """(named events or None, payloads) of a stream."""
    out = []
    name = None
    with httpx.stream("POST", live.url + path, json=body, headers=headers or {}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: ") and line != "data: [DONE]":
                out.append((name, json.loads(line[6:])))
    return out


def test_claude_code(agent):
    tools = [{"name": "read", "description": "Reads.", "input_schema": READ}]
    body = {
        "model": "demo",
        "max_tokens": 2000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=00000;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
                    {"type": "text", "text": "Read it.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                ],
            }
        ],
        "tools": tools,
        "metadata": {"user_id": "user_x_account__session_y"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14", "anthropic-version": "2023-06-01"}
    first = events(agent, "/v1/messages?beta=true", body, headers)
    blocks = [p["content_block"] for n, p in first if n == "content_block_start"]
    assert [b["type"] for b in blocks] == ["thinking", "tool_use"]
    arguments = "".join(p["delta"].get("partial_json", "") for n, p in first if n == "content_block_delta")
    assert json.loads(arguments) == {"path": "src/main.py", "limit": 10}
    thinking = "".join(p["delta"].get("thinking", "") for n, p in first if n == "content_block_delta")
    signature = next(p["delta"]["signature"] for n, p in first if "signature" in p.get("delta", {}))
    body["messages"] += [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": thinking, "signature": signature},
                {"type": "tool_use", "id": blocks[1]["id"], "name": "read", "input": json.loads(arguments)},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "print(1)", "is_error": False}
            ],
        },
    ]
    body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1.0; cch=fffff;"
    second = events(agent, "/v1/messages?beta=true", body, headers)
    text = "".join(p["delta"].get("text", "") for n, p in second if n == "content_block_delta")
    assert text == "All done." and second[-2][1]["delta"]["stop_reason"] == "end_turn"
    one, two = agent.engine.submitted
    known = one.prompt + one.output
    assert two.prompt[: len(known)] == known, "the second turn begins with the first, checksum and all"
    count = httpx.post(
        agent.url + "/v1/messages/count_tokens?beta=true",
        json={"model": "demo", **{k: body[k] for k in ("messages", "system", "tools", "thinking")}},
    )
    assert count.json()["input_tokens"] == len(two.prompt)


def test_codex(agent):
    body = {
        "model": "demo",
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]},
        ],
        "tools": [
            {"type": "function", "name": "read", "description": "", "strict": False, "parameters": READ},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "web_search"},
            {"type": "namespace", "name": "mcp", "description": "", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "abc",
        "text": {"verbosity": "low"},
    }
    first = events(agent, "/v1/responses", body)
    done = first[-1][1]["response"]
    assert first[-1][0] == "response.completed" and [i["type"] for i in done["output"]] == [
        "reasoning",
        "function_call",
    ]
    call = done["output"][1]
    body["input"] += [
        *done["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "print(1)"},
    ]
    second = events(agent, "/v1/responses", body)
    assert second[-1][1]["response"]["output"][-1]["content"][0]["text"] == "All done."
    one, two = agent.engine.submitted
    assert two.prompt[: len(one.prompt + one.output)] == one.prompt + one.output


OPENCODE = {
    "model": "demo",
    "max_tokens": 2000,
    "temperature": 0.55,
    "top_p": 1,
    "messages": [
        {"role": "system", "content": "You are opencode."},
        {"role": "system", "content": "Environment."},
        {"role": "user", "content": [{"type": "text", "text": "Read it."}]},
    ],
    "tools": [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": READ}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}


def test_opencode(agent):
    chunks = [p for _, p in events(agent, "/v1/chat/completions", OPENCODE)]
    calls = [c for p in chunks for ch in p["choices"] for c in ch["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "read" and {c["index"] for c in calls} == {0}
    arguments = "".join(c["function"]["arguments"] for c in calls)
    assert json.loads(arguments) == {"path": "src/main.py", "limit": 10}
    assert chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []
    function = {"name": "read", "arguments": arguments}
    history = [
        *OPENCODE["messages"],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Let me see.",
            "tool_calls": [{"id": calls[0]["id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "print(1)"},
    ]
    chunks = [p for _, p in events(agent, "/v1/chat/completions", {**OPENCODE, "messages": history})]
    assert "".join(ch["delta"].get("content") or "" for p in chunks for ch in p["choices"]) == "All done."
    one, two = agent.engine.submitted
    assert two.prompt[: len(one.prompt + one.output)] == one.prompt + one.output


def test_cline(agent):
    body = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "You are Cline. Tools are XML: <read_file><path>x</path></read_file>"},
            {"role": "user", "content": [{"type": "text", "text": "<task>Go</task>"}, {"type": "text", "text": "env"}]},
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
    }
    chunks = [p for _, p in events(agent, "/v1/chat/completions", body)]
    reasoning = "".join(ch["delta"].get("reasoning_content") or "" for p in chunks for ch in p["choices"])
    assert reasoning == "Let me see." and chunks[-1]["usage"]["prompt_tokens"] > 0


def test_open_webui(agent):
    models = httpx.get(agent.url + "/v1/models").json()["data"]
    body = {
        "stream": True,
        "model": models[0]["id"],
        "messages": [{"role": "user", "content": "Hi"}],
        "params": {},
        "features": {"web_search": False},
        "session_id": "s",
        "chat_id": "c",
        "stream_options": {"include_usage": True},
    }
    chunks = [p for _, p in events(agent, "/v1/chat/completions", body)]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    title = {"model": models[0]["id"], "messages": body["messages"], "stream": False, "max_completion_tokens": 1000}
    assert httpx.post(agent.url + "/v1/chat/completions", json=title).json()["choices"][0]["message"]["content"]
