"""What `soloist capture` does with its options: pick what to observe, load the engine, answer, print."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from soloist import progress
from soloist.engine.build import model_directory
from soloist.errors import SettingError
from soloist.offline import Engine
from soloist.prepare.capture import Target, capture
from soloist.prepare.texts import Reader
from soloist.settings import KNOBS, Settings

TARGETS: tuple[Target, ...] = ("lm_head", "mtp", "drafter")


def run(
    settings: Settings,
    prompts: Path | None,
    out: Path,
    parts: Sequence[str],
    tokens: int,
    temperature: float | None,
    thinking: bool | None,
    seed: int,
) -> None:
    """Carry out the command and print what was kept. Raises UserErrors."""
    unknown = [part for part in parts if part not in TARGETS]
    if unknown:
        raise SettingError(f"--part {unknown[0]} cannot be captured.", f"Choose from {', '.join(TARGETS)}.")
    if {"mtp", "drafter"} <= set(parts):
        raise SettingError("One run drafts with one drafter.", "Capture mtp and drafter in two runs.")
    directory = model_directory(settings.model)
    switches = {} if thinking is None else {"enable_thinking": thinking}
    with resources.as_file(resources.files("soloist.prepare").joinpath("prompts.txt")) as own:
        asked = Reader(directory).prompts(prompts or own, **switches)
    knobs = {name: getattr(settings, name) for name in KNOBS if settings.given(name) and name != "model"}
    wanted = next((spec for part, spec in (("mtp", "mtp"), ("drafter", "dflash2")) if part in parts), None)
    if wanted is not None:
        if settings.given("spec") and settings.spec != wanted:
            raise SettingError(f"--part needs SPEC={wanted}, not {settings.spec}.", "Leave out --spec.")
        knobs["spec"] = wanted
    # Every prompt is met once: nothing to resume, nothing to keep.
    knobs["prefix_cache"] = False
    with progress.bar(f"Loading {settings.model}"):
        engine = Engine(settings.model, **knobs)
    with engine:
        targets = [target for target in TARGETS if target in parts] or ["lm_head", *_drafting(engine)]
        with progress.bar("Answering") as shown:
            rows = capture(
                engine,
                asked,
                out,
                targets,
                tokens=tokens,
                seed=seed,
                temperature=temperature,
                together=settings.max_seqs,
                progress=shown,
            )
    for module, n in rows.items():
        print(f"{module:40} {n:>10,} rows")
    print(f"{out} is complete.")


def _drafting(engine: Engine) -> list[Target]:
    """What the loaded engine drafts with, as a part that can be captured."""
    name = getattr(getattr(engine.engine, "speculation", None), "name", "")
    return ["mtp"] if name == "mtp" else ["drafter"] if name == "dflash2" else []
