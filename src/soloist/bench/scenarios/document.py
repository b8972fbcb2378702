"""`document`: six tasks over one long document, then a four-turn chat about it with the cache on, off and restarted.

Copying is where lookup drafting pays and where a wrong state shows, so the copy is checked character by character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from soloist.bench.client import Answer
from soloist.bench.document_text import Document, copied_prefix, document_of_tokens, tasks
from soloist.bench.measure import Spread, decode_rate, speculation_of
from soloist.bench.result import Column, Panel, Result, Table, series_of
from soloist.bench.run import GREEDY, Context, salt, salted

QUESTIONS = (
    "Who looks after the first unit of the document?",
    "Which commands belong to the second section?",
    "What must be written into the book afterwards?",
    "Give the title of the document.",
)

TASK_COLUMNS = [
    Column("task", "task"),
    Column("decode", "decode tok/s", 1),
    Column("tokens_per_step", "tokens/step", 2),
    Column("ttft", "TTFT ms", 0),
    Column("tokens", "answer tokens", 0),
    Column("finish", "finish"),
    Column("exact", "checked"),
]

TURN_COLUMNS = [
    Column("cache", "cache"),
    Column("turn", "turn", 0),
    Column("ttft", "TTFT ms", 0),
    Column("prompt_tokens", "prompt tokens", 0),
    Column("cached", "of them cached", 0),
]


async def run(
    context: Context,
    *,
    tokens: int = 25_000,
    copy_lines: int = 60,
    max_tokens: int = 1024,
    turn_tokens: int = 96,
    seed: int = 0,
    wait_for_restart: Callable[[], None] | None = None,
) -> Result:
    """Measure. The restarted chat needs a server that --serve started, or `wait_for_restart` (asks the user)."""
    result = Result(
        "document",
        settings={"tokens": tokens, "copy_lines": copy_lines, "max_tokens": max_tokens, "repeats": context.repeats},
    )
    document = await document_of_tokens(context.client, tokens, seed)
    copy_lines = min(copy_lines, len(document.lines))
    await context.warm()
    result.tables = [await _tasks(context, result, document, copy_lines, max_tokens)]
    turns = Table("Chat about the document, time to first token by turn", TURN_COLUMNS)
    history = await _chat(context, result, turns, "on", document, turn_tokens, word=salt())
    await _chat(context, result, turns, "off", document, turn_tokens, word=None)
    await _after_restart(context, result, turns, history, turn_tokens, wait_for_restart)
    result.tables.append(turns)
    result.panels = _panels(result.tables[0], turns)
    return result


async def _tasks(context: Context, result: Result, document: Document, copy_lines: int, max_tokens: int) -> Table:
    table = Table("Tasks over the document, one request at a time", TASK_COLUMNS)
    result.details["copies"] = {}
    for name, instruction in tasks(document, copy_lines):
        answers = []
        for _ in range(context.repeats):
            answer = await context.chat(f"{document.text}\n\n{instruction}", max_tokens=max_tokens, **GREEDY)
            answers.append(answer)
            context.tick(name)
            if answer.error:
                result.failures.append(f"{name}: {answer.error}")
        if len({a.text for a in answers}) > 1:
            result.failures.append(f"{name}: greedy repeats gave different texts")
        table.rows.append(_task_row(name, answers, checked(name, answers[0], document, copy_lines)))
        result.details["copies"][name] = answers[0].text[:2000]
    return table


def _task_row(name: str, answers: Sequence[Answer], verdict: str | None) -> dict[str, Any]:
    specs = [speculation_of([a]) for a in answers]
    return {
        "task": name,
        "decode": Spread.of(decode_rate(1, [a]) for a in answers),
        "tokens_per_step": Spread.of(s.tokens_per_step if s else None for s in specs),
        "ttft": Spread.of(a.ttft_ms for a in answers),
        "tokens": Spread.of(a.completion_tokens for a in answers),
        "finish": answers[0].finish_reason,
        "exact": verdict,
    }


def checked(name: str, answer: Answer, document: Document, copy_lines: int) -> str | None:
    """What can be verified about an answer without judging its prose; None where nothing can."""
    if name == "copy":
        expected = document.head(copy_lines)
        right = copied_prefix(expected, answer.text)
        cut = answer.finish_reason == "length" and right >= len(answer.text.strip()) > 0
        return (
            "exact" if right == len(expected) else f"{right} of {len(expected)} characters" + (" (cut)" if cut else "")
        )
    if name in ("commands", "shorten"):
        kept = sum(command in answer.text for command in document.commands)
        return f"{kept} of {len(document.commands)} commands"
    if name == "answer":
        return "right" if document.facts[len(document.facts) // 2][1] in answer.text else "wrong"
    return None


async def _chat(
    context: Context, result: Result, table: Table, cache: str, document: Document, max_tokens: int, word: str | None
) -> list[dict[str, Any]]:
    """Four turns. `word` None salts every turn anew, so that nothing can be reused; returns the conversation."""
    history: list[dict[str, Any]] = []
    for turn, question in enumerate(QUESTIONS, 1):
        text = f"{document.text}\n\n{question}" if turn == 1 else question
        history.append({"role": "user", "content": text})
        answer = await context.chat(_opened(history, word or salt()), max_tokens=max_tokens, **GREEDY)
        context.tick(f"turn {turn}, cache {cache}")
        if answer.error:
            result.failures.append(f"turn {turn}, cache {cache}: {answer.error}")
        history.append({"role": "assistant", "content": answer.text})
        table.rows.append(_turn_row(cache, turn, answer))
    return _opened(history, word or "")


def _opened(history: Sequence[dict[str, Any]], word: str) -> list[dict[str, Any]]:
    first, *rest = history
    return [{**first, "content": salted(first["content"], word)}, *rest]


async def _after_restart(
    context: Context,
    result: Result,
    table: Table,
    history: list[dict[str, Any]],
    max_tokens: int,
    wait_for_restart: Callable[[], None] | None,
) -> None:
    if context.server is not None:
        seconds = await context.server.restart()
        result.notes.append(f"The server was restarted before the last row; it answered again after {seconds:.1f} s.")
    elif wait_for_restart is not None:
        wait_for_restart()
    else:
        result.notes.append("The turn after a restart was not measured: give --serve COMMAND or --ask-restart.")
        return
    await context.warm()
    question = {"role": "user", "content": "Now name one unit of the document."}
    answer = await context.chat([*history, question], max_tokens=max_tokens, **GREEDY)
    if answer.error:
        result.failures.append(f"turn after restart: {answer.error}")
    table.rows.append(_turn_row("after restart", len(QUESTIONS) + 1, answer))


def _turn_row(cache: str, turn: int, answer: Answer) -> dict[str, Any]:
    return {
        "cache": cache,
        "turn": turn,
        "ttft": answer.ttft_ms,
        "prompt_tokens": answer.prompt_tokens,
        "cached": answer.cached_tokens,
    }


def _panels(task_table: Table, turns: Table) -> list[Panel]:
    def bars(title: str, unit: str, key: str) -> Panel:
        names = [r["task"] for r in task_table.rows]
        return Panel(title, "", unit, "bar", [series_of(key, names, [r[key] for r in task_table.rows])])

    panels = [
        bars("Decode rate by task", "tok/s", "decode"),
        bars("Tokens per step by task", "tokens", "tokens_per_step"),
        Panel("Time to first token by turn", "turn", "ms", "line", []),
    ]
    for cache in dict.fromkeys(r["cache"] for r in turns.rows):
        rows = [r for r in turns.rows if r["cache"] == cache]
        panels[2].series.append(series_of(f"cache {cache}", [r["turn"] for r in rows], [r["ttft"] for r in rows]))
    return [p for p in panels if any(v is not None for s in p.series for v in s.y)]
