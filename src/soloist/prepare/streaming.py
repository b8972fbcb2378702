"""The decoder one layer at a time: calibration and evaluation of a model that does not fit in memory.

Streams of several texts wait between layers; a layer is loaded, all texts pass through it, it is dropped. The
blocks are the serving ones (`models/layers.py`), fed with whole texts from position 0. Texts are padded to the
64-grid the prefill form wants; padded rows never reach a Hessian or a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from soloist.checkpoint.reader import Checkpoint
from soloist.models.layers import MLP, Attention, DecoderNorms, DeltaNet, Loader, Source
from soloist.models.step import GRID
from soloist.ops.attention import prefill_attention
from soloist.ops.gated_delta import chunk_scan
from soloist.ops.linear import Weight
from soloist.ops.norms import rms_norm
from soloist.ops.products import Linear
from soloist.ops.rope import inverse_frequencies, rope_tables
from soloist.prepare.gptq import Hessian

Watcher = Callable[[torch.Tensor], None]


class Watched(Linear):
    """A product that shows its inputs to a watcher before it computes."""

    def __init__(self, inner: Linear, watcher: Watcher) -> None:
        super().__init__((inner.out_features, inner.in_features))
        self.inner, self.watcher = inner, watcher

    @classmethod
    def refuses(cls, weight: Weight, device: torch.device, dtype: torch.dtype) -> str | None:
        return "wraps another product"

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        self.watcher(x)
        return self.inner(x, residual)


class Overlay:
    """A weight source in which some modules are replaced."""

    def __init__(self, base: Source, replaced: Mapping[str, Weight]) -> None:
        self.base, self.replaced = base, replaced

    def weight(self, module: str) -> Weight:
        return self.replaced[module] if module in self.replaced else self.base.weight(module)

    def tensor(self, name: str) -> torch.Tensor:
        return self.base.tensor(name)


class Layer:
    """One loaded decoder layer and what reads the same input in it."""

    def __init__(self, load: Loader, index: int, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        prefix = f"layers.{index}"
        self.norms, self.mlp = DecoderNorms(load, prefix, config.eps), MLP(load, f"{prefix}.mlp")
        self.mixer: Attention | DeltaNet
        if config.layer_types[index] == "full_attention":
            self.mixer = Attention(load, f"{prefix}.self_attn", config)
        else:
            self.mixer = DeltaNet(load, f"{prefix}.linear_attn", config)
        self.conv_rows = config.conv_kernel - 1
        self.inverse = inverse_frequencies(config.rope_dim, config.rope_theta, load.device)

    def watch(self, prefix: str, valid: Callable[[], int]) -> dict[str, Hessian]:
        """Attach Hessians to the products; module name -> its Hessian (shared where the input is)."""
        found: dict[str, Hessian] = {}

        def attach(owner: object, attribute: str, modules: Sequence[str]) -> None:
            inner: Linear = getattr(owner, attribute)
            hessian = Hessian(inner.in_features, self.inverse.device)
            setattr(owner, attribute, Watched(inner, lambda x: hessian.add(x[: valid()])))
            found.update(dict.fromkeys(modules, hessian))

        if isinstance(self.mixer, Attention):
            attach(self.mixer, "qkv", [f"{prefix}.self_attn.{x}_proj" for x in "qkv"])
            attach(self.mixer, "out", [f"{prefix}.self_attn.o_proj"])
        else:
            attach(self.mixer, "qkvz", [f"{prefix}.linear_attn.in_proj_{x}" for x in ("qkv", "z")])
            attach(self.mixer, "out", [f"{prefix}.linear_attn.out_proj"])
        attach(self.mlp, "gate_up", [f"{prefix}.mlp.{x}_proj" for x in ("gate", "up")])
        attach(self.mlp, "down", [f"{prefix}.mlp.down_proj"])
        return found

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, valid: int) -> torch.Tensor:
        """x [T, H], T a multiple of 64, the first `valid` rows real -> the stream after the layer."""
        h = self.norms.mixer(x)
        if isinstance(self.mixer, Attention):
            cos, sin = rope_tables(torch.arange(x.shape[0], device=x.device), self.inverse)
            q, gate, k, v = self.mixer.project(h, cos, sin)
            x = self.mixer.finish(prefill_attention(q, k, v, 0, GRID, self.mixer.scale), gate, x)
        else:
            history = h.new_zeros(self.conv_rows, self.mixer.channels)
            inputs, z, _ = self.mixer.prefill_inputs(h, history, valid)
            state = torch.zeros(self.mixer.heads, self.mixer.dk, self.mixer.dv, device=x.device)
            o, _ = chunk_scan(state, inputs.q, inputs.k, inputs.v, inputs.decay, inputs.beta, state_dtype=torch.float32)
            x = self.mixer.finish(o, z, x)
        return self.mlp(self.norms.mlp(x), x)


class Streams:
    """The residual streams of several texts, advanced layer by layer."""

    def __init__(
        self, checkpoint: Checkpoint, texts: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype
        self.lengths = [len(text) for text in texts]
        self.depth = 0
        embedding = checkpoint.weight("embed_tokens", copy=False)
        self.streams = []
        for text in texts:
            ids = torch.tensor([*text, *[0] * (-len(text) % GRID)])
            self.streams.append(embedding.rows(ids, dtype).to(device))

    def load(self, source: Source) -> Layer:
        """The next layer, with weights from `source`."""
        return Layer(Loader(source, self.device, self.dtype, "plain"), self.depth, self.checkpoint)

    def watch(self) -> dict[str, Hessian]:
        """Hessians of the next layer's modules over all texts; the streams stay where they are."""
        layer = self.load(self.checkpoint)
        valid = 0
        hessians = layer.watch(f"layers.{self.depth}", lambda: valid)
        for stream, length in zip(self.streams, self.lengths, strict=True):
            valid = length
            layer(stream, length)
        return hessians

    def advance(self, source: Source | None = None) -> None:
        """Pass all texts through the next layer of `source` (default: the checkpoint itself)."""
        layer = self.load(source or self.checkpoint)
        self.streams = [layer(stream, length) for stream, length in zip(self.streams, self.lengths, strict=True)]
        self.depth += 1

    def hidden(self) -> Iterator[torch.Tensor]:
        """Per text the rows [T, H] after the final norm: what the head reads. All layers must be done."""
        assert self.depth == self.checkpoint.config.num_layers
        factor = self.checkpoint.tensor("norm.weight").to(self.device, torch.float32) + 1
        for stream, length in zip(self.streams, self.lengths, strict=True):
            yield rms_norm(stream[:length], factor, self.checkpoint.config.eps)
