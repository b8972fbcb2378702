"""The recurrence of a step on a card, `cuda/delta.cu`: walk with the gated norm behind it, and fold.

It replaces the Triton kernels of `triton/delta.py` where activations are bf16 and a head's sizes suit it; a model's
walk and fold must both be one or the other, for a fold must give the walk's bits. What can go wrong: `walk` reads the
states before it waits for its predecessor, so it must not directly follow the kernel that writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from soloist.ops.cuda import nvrtc

THREADS = 128  # at most
STATES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SIGNATURE = "pppppp" + "ppppi" + "llll" + "i" + "ppppp" + "pipfp"


def columns(dv: int) -> int:
    """Columns of a head that one block of the kernel holds."""
    return 32 if dv % 64 else 64


def threads(dv: int) -> int:
    """Threads of a block: a warp per 16 columns."""
    return columns(dv) * 2


def why_not(device: torch.device, dtype: torch.dtype, dk: int, dv: int, heads: tuple[int, int]) -> str | None:
    """Why the kernel cannot run this recurrence (heads: key heads, value heads), or None."""
    if device.type != "cuda":
        return "runs on a card only"
    if dtype is not torch.bfloat16:
        return "activations must be bfloat16"
    if dk % 16 or dv % 32 or dk > 128 or heads[1] % heads[0]:
        return f"heads of {dk} x {dv} (keys a multiple of 16 up to 128, values of 32)"
    return None


def walk_arguments(
    states: torch.Tensor, record: Sequence[torch.Tensor], walked: torch.Tensor, scratch: torch.Tensor,
    table: dict[str, torch.Tensor], z: torch.Tensor, norm: torch.Tensor, eps: float, mixed: torch.Tensor,
    arrivals: torch.Tensor,
) -> tuple[int | float, ...]:  # fmt: skip
    """What the kernel is given for `Recurrence.walk`; arrivals int32 [requests, Hv]: zero, and left so."""
    q, k, v, decay, beta = record
    return (
        states.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), beta.data_ptr(),
        table["slots"].data_ptr(), table["starts"].data_ptr(), table["counts"].data_ptr(), 0, 0,
        0, 0, 0, 0, table["slots"].numel(),
        table["parent"].data_ptr(), table["keep"].data_ptr(), scratch.data_ptr(), walked.data_ptr(),
        arrivals.data_ptr(), z.data_ptr(), z.stride(0), norm.data_ptr(), eps, mixed.data_ptr(),
    )  # fmt: skip


def fold_arguments(
    states: torch.Tensor, record: Sequence[torch.Tensor], path: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> tuple[int | float, ...]:
    """What the kernel is given for `Recurrence.fold`."""
    q, k, v, decay, beta = record
    return (
        states.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), beta.data_ptr(),
        slots.data_ptr(), 0, lengths.data_ptr(), path.data_ptr(), path.stride(0),
        states.stride(0), k.stride(0), v.stride(0), decay.stride(0), slots.numel(),
        0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0,
    )  # fmt: skip


class Recurrence:
    """Walk and fold of all Gated DeltaNet layers of a model."""

    def __init__(
        self, key_heads: int, value_heads: int, dk: int, dv: int, act: str, device: torch.device,
        requests: int, cache_directory: Path | None = None,
    ) -> None:  # fmt: skip
        major, minor = torch.cuda.get_device_capability(device)
        self._arch = major * 10 + minor
        self._macros = {"HK": key_heads, "HV": value_heads, "DK": dk, "DV": dv, "SIGMOID": int(act == "sigmoid")}
        self._blocks, self._threads = value_heads * dv // columns(dv), threads(dv)
        self._arrivals = torch.zeros(requests * value_heads, dtype=torch.int32, device=device)
        self._cache = cache_directory

    def _kernel(self, state: torch.dtype, fold: bool) -> nvrtc.Kernel:
        dependent = not fold and self._arch >= 90
        macros = {**self._macros, "STATE": STATES[state], "FOLD": int(fold), "PDL": int(dependent)}
        return nvrtc.load(
            "delta", "delta", self._arch, tuple(macros.items()), self._threads, 0, SIGNATURE, dependent, self._cache
        )

    def walk(
        self,
        states: torch.Tensor,
        record: Sequence[torch.Tensor],
        walked: torch.Tensor,
        scratch: torch.Tensor,
        table: dict[str, torch.Tensor],
        z: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        mixed: torch.Tensor,
    ) -> None:
        """Verify the rows of every request and norm them: mixed [T, Hv * dv] = norm * o / rms(o) * act(z).

        states [slots, Hv, dk, dv]; record = (q, k [T, Hk, dk], v [T, Hv, dv], decay, beta [T, Hv]) fp32; walked [T, Hv,
        dv] fp32 and scratch (as in `triton.delta.walk`) are left with o and the kept states; z [T, Hv * dv] bf16, any
        row stride; table: slots, starts, counts, parent, keep.
        """
        requests = table["slots"].numel()
        assert requests * self._macros["HV"] <= self._arrivals.numel() and z.stride(1) == 1 and mixed.is_contiguous()
        arguments = walk_arguments(states, record, walked, scratch, table, z, norm, eps, mixed, self._arrivals)
        stream = torch.cuda.current_stream(states.device).cuda_stream
        self._kernel(states.dtype, False).launch(self._blocks * requests, arguments, stream)

    def fold(
        self,
        states: torch.Tensor,
        record: Sequence[torch.Tensor],
        path: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Settle the accepted rows of every layer.

        states [L, slots, Hv, dk, dv]; record tensors as `walk` read them, with a leading layer but for q; path int32
        [R, >= longest]: accepted rows, anchor first; lengths [R] (0: nothing to settle).
        """
        layers, requests = states.shape[0], slots.numel()
        arguments = fold_arguments(states, record, path, lengths, slots)
        stream = torch.cuda.current_stream(states.device).cuda_stream
        self._kernel(states.dtype, True).launch(self._blocks * requests * layers, arguments, stream)
