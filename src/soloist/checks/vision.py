"""Pictures: the extra packages, the tower in the checkpoint, the preprocessor's settings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import util

from soloist.checks.base import Subject, Verdict, check, fail, ok, verdict
from soloist.errors import CheckpointError


@check(
    "vision",
    "Pictures",
    "With VISION=1 the checkpoint must hold its vision tower and preprocessor config, and transformers and "
    "pillow must be installed.",
    off=ok("VISION=0: pictures are refused"),
    fine=ok("a tower of {depth} blocks, {pixels} pixels a token"),
    package=fail("VISION=1 needs {package}, which is not installed.", "Run `pip install 'soloist[vision]'`."),
    no_tower=fail(
        "VISION=1, but {directory} has no vision tower (model.visual.* tensors).",
        "Use the original checkpoint, or set VISION=0.",
    ),
    broken=fail("{message}", "{remedy}"),
    unread=ok("not looked at: the model directory cannot be opened"),
)
def vision(subject: Subject) -> Iterator[Verdict]:
    if not subject.settings.vision:
        yield verdict("off")
        return
    missing = [name for module, name in (("transformers", "transformers"), ("PIL", "pillow")) if not _installed(module)]
    yield from (verdict("package", package=name) for name in missing)
    from soloist.checkpoint.processor import read_processor
    from soloist.checkpoint.reader import open_checkpoint

    try:
        opened = open_checkpoint(subject.model_directory)
    except CheckpointError:
        yield verdict("unread")
        return
    if not opened.visual or not opened.config.vision:
        yield verdict("no_tower", directory=subject.model_directory)
        return
    try:
        processor = read_processor(subject.model_directory)
    except CheckpointError as error:
        yield verdict("broken", message=error.message, remedy=error.remedy)
        return
    if not missing:
        yield verdict("fine", depth=opened.config.vision.get("depth", 27), pixels=processor.factor**2)


def _installed(module: str) -> bool:
    return util.find_spec(module) is not None
