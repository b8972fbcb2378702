"""Tables of the documentation, written from the results in benchmarks/ between two comments of a page:

    <!-- figures: NAME -->
    ...
    <!-- end of figures -->

`tools/generate_docs.py` fills them in; a figure that is typed by hand goes stale without anybody noticing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soloist.bench.result import Result

DATA = Path(__file__).resolve().parent.parent / "benchmarks"
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def fill(page: str) -> str:
    """The page with every block written again. KeyError for a name that is not in `TABLES`."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", page)


def decode() -> str:
    """One request and eight against transformers, and how long a chat takes to say its first word."""
    found = _read("cpu/decode.json")
    rates, base = found["median"], found["median"]["transformers C1"]
    rows = [
        (f"transformers {found['versions']['transformers']} `generate`", base, 1.0),
        ("Soloist, `SPEC=none`", rates["plain C1"], rates["plain C1"] / base),
        ("Soloist, default knobs (MTP and lookup)", rates["default C1"], rates["default C1"] / base),
        ("Soloist, `SPEC=none`, 8 requests at once", rates["plain C8"], None),
        ("Soloist, default knobs, 8 requests at once", rates["default C8"], None),
    ]
    body = [[name, f"{rate:.0f}", "" if ratio is None else f"{ratio:.1f}"] for name, rate, ratio in rows]
    first = _read("cpu/first_token.json")["median"]
    return (
        f"{_table(['', 'tok/s', 'against transformers'], body)}\n\n"
        f"From starting `soloist chat` to the first streamed character, its server's start included: {first:.1f} s\n"
        "([data](benchmarks/cpu/first_token.json))."
    )


def speculation() -> str:
    """Tokens per step by setting and kind of text, greedy and at T=1."""
    found = _read("cpu/speculation.json")
    greedy, sampled = found["table"]["greedy"], found["table"]["T=1"]
    kinds = list(greedy)
    rows = []
    for name in greedy[kinds[0]]:
        pairs = [f"{t[k][name]['tokens_per_step']:.2f}" for k in kinds for t in (greedy, sampled)]
        rows.append([name, *(f"{a} / {b}" for a, b in zip(pairs[::2], pairs[1::2], strict=True))])
    shares = ", ".join(f"{k} {greedy[k]['mtp tree + lookup']['lookup_share']:.0%}" for k in kinds)
    copied = (
        f"The copy is {found['copied_tokens']} tokens long and {'exact' if found['copy_is_exact'] else 'NOT exact'}."
    )
    table = _table(["setting (greedy / T=1)", *kinds], rows)
    return f"{table}\n\nShare of the text that lookup supplied (MTP tree + lookup, greedy): {shares}.\n{copied}"


def classes() -> str:
    """Decode on a CPU by kind of text, default knobs over no speculation, and what the worst kind loses."""
    kinds = _read("cpu/classes.json")["kinds"]
    rows = [
        [
            kind,
            f"{row['none']['tokens_per_s']:.0f}",
            f"{row['default']['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['wanted']:.2f}",
            f"{row['default']['drafting_steps']:.0%}",
        ]
        for kind, row in kinds.items()
    ]
    head = ["kind of text", "tok/s without", "tok/s with", "ratio", "aim", "steps that drafted"]
    return _table(head, rows)


def scenarios() -> str:
    """The tables of every scenario on the demo, with what they were taken on."""
    parts = []
    for name, keys in SHOWN.items():
        path = DATA / "demo-cpu" / f"{name}.json"
        run = Result.read(path)
        about = run.about
        load = about.get("load_average", ["?"])[0]
        parts.append(
            f"### {name}\n\n`{about['command']}`; commit {about['commit']}, load average {load} on "
            f"{about['machine']['cores']} cores ([data](../benchmarks/demo-cpu/{name}.json))."
        )
        for table in run.tables:
            table.columns = [c for c in table.columns if c.key not in keys]
            parts.append(table.markdown())
    return "\n\n".join([*parts, _soak(), _smoke()])


# What is left out of the page: the data has it.
SHOWN: dict[str, tuple[str, ...]] = {
    "single": ("gap", "per_position", "prompt_tokens"),
    "ladder": (),
    "document": ("finish",),
    "prefill": (),
    "quality": (),
}


def _soak() -> str:
    run = Result.read(DATA / "demo-cpu/soak.json")
    rows = run.tables[0].rows
    requests = sum(row["requests"] for row in rows)
    different = requests - sum(row["same"] for row in rows)
    half, last = rows[len(rows) // 2], rows[-1]
    return (
        f"### soak\n\n`{run.about['command']}`; commit {run.about['commit']} "
        "([data](../benchmarks/demo-cpu/soak.json)).\n\n"
        f"{len(rows)} rounds, {requests} requests, {different} different from the first round in text or in the last "
        f"bit of a log-probability; {rows[1]['pages']:.0f} pages held when idle after round 2, {last['pages']:.0f} at "
        f"the end; resident memory {half['memory']:.0f} MiB half way, {last['memory']:.0f} MiB at the end. "
        f"Failures: {len(run.failures)}."
    )


def _smoke() -> str:
    ours, theirs = (Result.read(DATA / name) for name in ("demo-cpu/smoke.json", "peers/vllm-cpu-smoke.json"))
    version = theirs.about["server"]["version"]
    return (
        f"### smoke\n\nSoloist: {ours.notes[0]} The demo on vLLM {version} (CPU): {theirs.notes[0]} "
        + " ".join(f"There: {failure}." for failure in theirs.failures)
    ).rstrip()


def _read(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "decode": decode,
    "speculation": speculation,
    "classes": classes,
    "scenarios": scenarios,
}
