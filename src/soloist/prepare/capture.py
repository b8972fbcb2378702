"""`soloist capture`: run prompts through the serving engine and keep what its quantisation needs.

Hessians of the inputs that head, MTP module and drafter really see while the model speculates on its own
answers (rows of rejected drafts included: they are computed in service too), the answers, and how often each token
occurs in them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from soloist.checkpoint.writer import write_text_atomic
from soloist.drafting.dflash2 import DFlash2Drafter
from soloist.drafting.mtp import MTPDrafter
from soloist.engine.engine import Engine
from soloist.engine.speculator import Speculator
from soloist.errors import CheckpointError, SettingError
from soloist.models.dflash2 import DFlash2
from soloist.models.mtp import MTPModule
from soloist.offline import Engine as Offline
from soloist.ops.products import Linear
from soloist.prepare.gptq import Hessian
from soloist.prepare.hessians import SUMMARY, save_hessians
from soloist.prepare.recipe import OUTPUTS, TOKENS
from soloist.prepare.streaming import Watched
from soloist.progress import Progress, silent
from soloist.sampling.params import SamplingParams

Target = Literal["lm_head", "mtp", "drafter"]


class Observer:
    """Hessians of watched products, by the modules whose rows they stack."""

    def __init__(self) -> None:
        self.hessians: dict[str, Hessian] = {}

    def attach(self, owner: object, attribute: str, modules: Sequence[str]) -> None:
        """Put a watcher in front of the product `owner.attribute`."""
        inner: Linear = getattr(owner, attribute)
        hessian = Hessian(inner.in_features)
        setattr(owner, attribute, Watched(inner, _on_host(hessian)))
        self.hessians.update(dict.fromkeys(modules, hessian))

    def mtp(self, module: MTPModule) -> None:
        prefix = "mtp.layers.0"
        self.attach(module, "fc", ["mtp.fc"])
        self.attach(module.attention, "qkv", [f"{prefix}.self_attn.{x}_proj" for x in "qkv"])
        self.attach(module.attention, "out", [f"{prefix}.self_attn.o_proj"])
        self.attach(module.mlp, "gate_up", [f"{prefix}.mlp.{x}_proj" for x in ("gate", "up")])
        self.attach(module.mlp, "down", [f"{prefix}.mlp.down_proj"])

    def dflash2(self, model: DFlash2) -> None:
        """Block rows only: context rows go through a product of their own, and calibrating on them hurts drafts."""
        self.attach(model, "fc", ["fc"])
        for i, layer in enumerate(model.layers):
            prefix = f"layers.{i}"
            self.attach(layer, "qkv", [f"{prefix}.self_attn.{x}_proj" for x in "qkv"])
            self.attach(layer, "out", [f"{prefix}.self_attn.o_proj"])
            self.attach(layer, "gate_up", [f"{prefix}.mlp.{x}_proj" for x in ("gate", "up")])
            self.attach(layer, "down", [f"{prefix}.mlp.down_proj"])


def _on_host(hessian: Hessian) -> Callable[[torch.Tensor], None]:
    """A watcher whose matrix moves to the device of the first rows it sees."""

    def watch(x: torch.Tensor) -> None:
        if hessian.matrix.device != x.device:
            hessian.matrix = hessian.matrix.to(x.device)
        with torch.inference_mode():
            hessian.add(x)

    return watch


def observe(engine: Engine, targets: Sequence[Target]) -> Observer:
    """Attach watchers to a loaded engine. Raises SettingError if it does not run what is to be observed."""
    observer = Observer()
    drafter = engine.speculation.drafter if isinstance(engine.speculation, Speculator) else None
    if "lm_head" in targets:
        observer.attach(engine.model, "head", ["lm_head"])
    if "mtp" in targets:
        if not isinstance(drafter, MTPDrafter):
            raise SettingError("The engine does not draft with the MTP module.", "Capture mtp with SPEC=mtp.")
        observer.mtp(drafter.module)
    if "drafter" in targets:
        if not isinstance(drafter, DFlash2Drafter):
            raise SettingError("The engine does not draft with DFlash2.", "Capture drafter with SPEC=dflash2.")
        observer.dflash2(drafter.model)
    return observer


def capture(
    model: Offline,
    prompts: Sequence[Sequence[int]],
    out: Path,
    targets: Sequence[Target],
    *,
    tokens: int = 512,
    seed: int = 0,
    temperature: float | None = None,
    together: int = 8,
    progress: Progress = silent,
) -> dict[str, int]:
    """Answer every prompt and write the capture directory `out`. Returns rows per module.

    Answers use the model's sampling defaults (or `temperature`), seeded by their number. Raises CheckpointError if
    `out` holds a capture already.
    """
    if (out / SUMMARY).exists():
        raise CheckpointError(f"{out} holds a capture already.", "Choose another --out, or remove it.")
    engine = model.engine
    assert isinstance(engine, Engine)
    observer = observe(engine, targets)
    counts: Counter[int] = Counter()
    lines: list[str] = []
    defaults = dict(model.defaults) if temperature is None else {"temperature": temperature}
    for start in range(0, len(prompts), together):
        batch = prompts[start : start + together]
        room = max(1, engine.max_len - max(len(prompt) for prompt in batch))
        params = SamplingParams(
            **{**defaults, "max_tokens": min(tokens, room), "seed": seed + start, "stop_ids": engine.eos_ids}
        )
        for prompt, answer in zip(batch, model.generate(batch, params), strict=True):
            counts.update(answer.tokens)
            lines.append(json.dumps({"ids": [*prompt, *answer.tokens], "prompt": len(prompt)}))
        progress("prompts", min(start + together, len(prompts)), len(prompts))
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomic(out / OUTPUTS, "\n".join(lines) + "\n")
    write_text_atomic(out / TOKENS, json.dumps({str(token): n for token, n in sorted(counts.items())}) + "\n")
    rows = {name: hessian.rows for name, hessian in observer.hessians.items()}
    save_hessians(out, observer.hessians, {"prompts": len(prompts), "tokens": counts.total(), "seed": seed})
    return rows
