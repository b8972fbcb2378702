"""Output items of a Responses reply, as they grow, and the events that tell of them."""

from __future__ import annotations

from typing import Any

from soloist.server.chat_run import ChatRun
from soloist.server.choice import Update
from soloist.server.ids import new_id
from soloist.server.parsers.parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning

Event = tuple[str, dict[str, Any]]


_NAMES = {  # item type -> (stem of its text events, stem of its part events)
    "message": ("output_text", "content_part"),
    "reasoning": ("reasoning_text", "content_part"),
    "summary": ("reasoning_summary_text", "reasoning_summary_part"),
}


class Items:
    """Parts in, events out; `done` holds the finished items. At most one item is open.

    `summary` True tells of the thinking as its item's summary instead of as its content: a client that asked for a
    summary shows that and nothing else.
    """

    def __init__(self, run: ChatRun, summary: bool = False) -> None:
        self.done: list[dict[str, Any]] = []
        self._run = run
        self._summary = summary
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
            form = self._form(item)
            text_event, part_event = _NAMES[form]
            part = self._content_part(form, self._text)
            where = self._where(item)
            extra = {"logprobs": part["logprobs"]} if form == "message" else {}
            events.append((f"response.{text_event}.done", {**where, "text": self._text, **extra}))
            events.append((f"response.{part_event}.done", {**where, "part": part}))
            item["summary" if form == "summary" else "content"] = [part]
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
                return [*self._open("reasoning"), self._delta(text)]
            case Content(text):
                return [*self._open("message"), self._delta(text)]
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
            form = self._form(item)
            where = {**self._where(item), "part": self._content_part(form, "")}
            events.append((f"response.{_NAMES[form][1]}.added", where))
        return events

    def _form(self, item: dict[str, Any]) -> str:
        return "summary" if self._summary and item["type"] == "reasoning" else str(item["type"])

    def _delta(self, text: str) -> Event:
        assert self._item is not None
        self._text += text
        form = self._form(self._item)
        fields = {**self._where(self._item), "delta": text}
        if form == "message":
            fields["logprobs"], self._logprobs = self._logprobs, []
        return f"response.{_NAMES[form][0]}.delta", fields

    def _content_part(self, form: str, text: str) -> dict[str, Any]:
        if form != "message":
            return {"type": "summary_text" if form == "summary" else "reasoning_text", "text": text}
        logprobs = self._run.choices[0].logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        index = "summary_index" if self._form(item) == "summary" else "content_index"
        return {"item_id": item["id"], "output_index": len(self.done), index: 0}

    def _cut(self) -> bool:
        finish = self._run.choices[0].finish
        return self._run.cancelled or (finish is not None and finish.reason == "length")
