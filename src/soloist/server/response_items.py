"""Output items of a Responses reply, as they grow, and the events that tell of them."""

from __future__ import annotations

from typing import Any

from soloist.server.chat_run import ChatRun
from soloist.server.choice import Update
from soloist.server.ids import new_id
from soloist.server.parsers.parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning

Event = tuple[str, dict[str, Any]]


class Items:
    """Parts in, events out; `done` holds the finished items. At most one item is open."""

    def __init__(self, run: ChatRun) -> None:
        self.done: list[dict[str, Any]] = []
        self._run = run
        self._item: dict[str, Any] | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def add(self, update: Update) -> list[Event]:
        """Events of one step; its log-probabilities go with the first text delta."""
        self._logprobs += update.logprobs
        return [event for part in update.parts for event in self._part(part)]

    def close(self) -> list[Event]:
        """End the open item, if there is one."""
        if self._item is None:
            return []
        item, self._item = self._item, None
        item["status"] = "incomplete" if self._cut() else "completed"
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = self._text
            done = {"item_id": item["id"], "output_index": len(self.done), "arguments": self._text}
            events.append(("response.function_call_arguments.done", {**done, "name": item["name"]}))
        else:
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            part = self._content_part(kind, self._text)
            where = self._where(item)
            extra = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            events.append((f"response.{kind}.done", {**where, "text": self._text, **extra}))
            events.append(("response.content_part.done", {**where, "part": part}))
            item["content"] = [part]
        events.append(("response.output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        return events

    def message(self) -> dict[str, Any]:
        """The assistant message that the items amount to, for the stored conversation."""
        answer = self._run.choices[0].answer
        out: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            out["reasoning"] = answer.reasoning
        calls = [item for item in self.done if item["type"] == "function_call"]
        if calls:
            out["tool_calls"] = [
                {
                    "id": call["call_id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls
            ]
        return out

    def _part(self, part: Part) -> list[Event]:
        match part:
            case Reasoning(text):
                return [*self._open("reasoning"), self._delta("reasoning_text", text)]
            case Content(text):
                return [*self._open("message"), self._delta("output_text", text)]
            case CallStart(_, name):
                return [*self.close(), *self._open("function_call", name)]
            case CallArguments(_, text):
                assert self._item is not None
                self._text += text
                fields = {"item_id": self._item["id"], "output_index": len(self.done), "delta": text}
                return [("response.function_call_arguments.delta", fields)]
            case CallEnd():
                return self.close()

    def _open(self, kind: str, name: str = "") -> list[Event]:
        if self._item is not None and self._item["type"] == kind:
            return []
        events = self.close()
        self._text = ""
        item: dict[str, Any]
        if kind == "reasoning":
            item = {"id": new_id("rs_"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
        elif kind == "message":
            item = {"id": new_id("msg_"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
        else:
            item = {"id": new_id("fc_"), "type": kind, "call_id": new_id("call_"), "name": name, "arguments": ""}
            item["status"] = "in_progress"
        self._item = item
        events.append(("response.output_item.added", {"output_index": len(self.done), "item": dict(item)}))
        if kind != "function_call":
            part = self._content_part("reasoning_text" if kind == "reasoning" else "output_text", "")
            events.append(("response.content_part.added", {**self._where(item), "part": part}))
        return events

    def _delta(self, kind: str, text: str) -> Event:
        assert self._item is not None
        self._text += text
        fields = {**self._where(self._item), "delta": text}
        if kind == "output_text":
            fields["logprobs"], self._logprobs = self._logprobs, []
        return f"response.{kind}.delta", fields

    def _content_part(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning_text":
            return {"type": kind, "text": text}
        logprobs = self._run.choices[0].logprobs if text else []
        return {"type": kind, "text": text, "annotations": [], "logprobs": list(logprobs)}

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.done), "content_index": 0}

    def _cut(self) -> bool:
        finish = self._run.choices[0].finish
        return self._run.cancelled or (finish is not None and finish.reason == "length")
