"""W4A16 products for 1-32 rows on a card: the repack at load time and the launch of `cuda/w4a16.cu`.

The weight is streamed once per 32 rows; a row's bits depend on (N, K, multiprocessors) and on nothing else. What can
go wrong: a workspace shared by two streams (make one per stream), or a card whose
shared memory is too small for a row tile (the tile shrinks, the bits stay).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from soloist.ops.cuda import nvrtc
from soloist.ops.linear import QuantizedWeight

TILE_N, UNIT_K = 256, 64
ROW_TILES = (8, 16, 32)
K_GROUPS = 2
MAX_STAGES = 6
PART_N, MAX_PARTS = 64, 128  # columns of one sum of squares, and how many of them a row may come with
SIGNATURE = "pppppp" + "iiiiii" + "pii" + "piff" + "ipppi"  # of w4a16.cu


@dataclass(frozen=True)
class PackedW4:
    """A 4-bit weight in the kernel's order; see w4a16.cu for the layout.

    words   int32 [tiles, K / 64, 16, 32, 4]
    scales  fp16 or bf16 [tiles, groups, 8, 8, 2, 2]
    zeros   uint8, same order as scales, or None for the symmetric zero 8
    paired  the rows are two stacked matrices, 8 rows of each in turn: a gate meets its up projection in one thread
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    shape: tuple[int, int]
    group_units: int
    paired: bool = False

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def why_not_w4(weight: QuantizedWeight) -> str | None:
    """Why `pack` cannot take this weight, or None."""
    k = weight.shape[1]
    if weight.bits != 4:
        return f"{weight.bits}-bit codes (the kernel reads 4-bit ones)"
    units = weight.group // UNIT_K
    if weight.group % UNIT_K or k % weight.group or units & (units - 1):
        return f"group {weight.group} over K = {k} (the kernel needs groups of 64, 128, 256, .. that divide K)"
    if weight.scales.dtype not in (torch.float16, torch.bfloat16):
        return f"{weight.scales.dtype} scales (the kernel reads 16-bit ones)"
    return None


def _rows_to_tiles(values: torch.Tensor, tiles: int) -> torch.Tensor:
    """[tiles * 256, groups] -> [tiles, groups, warp 8, row 8, m-tile 2, half 2]."""
    return values.view(tiles, 8, 2, 2, 8, -1).permute(0, 5, 1, 4, 2, 3).contiguous()


def _fragment_words(codes: torch.Tensor) -> torch.Tensor:
    """Natural words [rows, units, 2, 4] (word, step half) -> fragment words [4 lanes t, rows, units, 2].

    Lane t takes byte t of four consecutive words: columns 2 t and 2 t + 1 of four runs of eight.
    """
    # Few and large operations: on a card their launches are what a repack costs.
    byte = codes.view(torch.uint8).unflatten(-1, (4, 4)).movedim(-1, 0).contiguous()
    word = byte.view(torch.int32).squeeze(-1)  # byte i of lane t: byte t of word i
    low, high = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
    for nibbles in (low, high):
        for shift, mask in ((4, 0x00FF00FF), (8, 0x0000FFFF)):  # close up what lies a byte apart
            nibbles |= nibbles >> shift
            nibbles &= mask
    return low | high << 16


def _in_turn(rows: torch.Tensor) -> torch.Tensor:
    """[2 F, ..] -> [256 ceil(F / 128), ..]: 8 rows of the first half, 8 of the second, ..; zero rows behind each."""
    half = rows.shape[0] // 2
    padded = -(-half // (TILE_N // 2)) * (TILE_N // 2) - half
    pair = torch.nn.functional.pad(rows.view(2, half, -1), (0, 0, 0, padded))
    return pair.view(2, -1, 8, rows.shape[1]).transpose(0, 1).reshape(-1, rows.shape[1])


def pack(weight: QuantizedWeight, paired: bool = False) -> PackedW4:
    """Repack a canonical 4-bit weight for the kernel, N padded to 256 with zero scales; `paired` as in PackedW4.

    Raises ValueError with the reason of `why_not_w4`.
    """
    reason = why_not_w4(weight)
    if reason is not None:
        raise ValueError(f"w4a16: {reason}")
    n, k = shape = weight.shape
    if paired:
        zeros = None if weight.zeros is None else _in_turn(weight.zeros)
        codes, scales = _in_turn(weight.codes), _in_turn(weight.scales)
        n = codes.shape[0]
        weight = QuantizedWeight(codes, scales, zeros, weight.bits, weight.group, (n, k))
    tiles, units = -(-n // TILE_N), k // UNIT_K
    device, padding = weight.codes.device, tiles * TILE_N - n
    words = torch.empty(tiles, units, 16, 32, 4, dtype=torch.int32, device=device)
    step = max(1, (1 << 24) // (TILE_N * k))
    for first in range(0, tiles, step):
        codes = weight.codes[first * TILE_N : (first + step) * TILE_N]
        count = -(-codes.shape[0] // TILE_N)
        if codes.shape[0] < count * TILE_N:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, count * TILE_N - codes.shape[0]))
        fragments = _fragment_words(codes.view(-1, units, 2, 4)).view(4, count, 16, 2, 8, units, 2)
        words[first : first + count] = fragments.permute(1, 5, 2, 4, 0, 3, 6).reshape(count, units, 16, 32, 4)
    pad = torch.nn.functional.pad
    zeros = None if weight.zeros is None else _rows_to_tiles(pad(weight.zeros, (0, 0, 0, padding)), tiles)
    scales = _rows_to_tiles(pad(weight.scales, (0, 0, 0, padding)), tiles)
    return PackedW4(words, scales, zeros, shape, weight.group // UNIT_K, paired)


def m_tiles_per_warp(row_tile: int) -> int:
    """16-column tiles a warp of the decode kernel computes: two, or four where two would not fit the registers."""
    return 4 if row_tile == 32 else 2


def threads(row_tile: int) -> int:
    """Threads of a block of the decode kernel."""
    return K_GROUPS * TILE_N // 16 // m_tiles_per_warp(row_tile) * 32


@dataclass(frozen=True)
class Ring:
    """How a row tile's ring is laid out in shared memory: bits do not depend on it."""

    units: int
    stages: int
    shared: int


def plan_ring(row_tile: int, zeros: bool, shared_limit: int) -> Ring | None:
    """Two units of 64 a stage where three stages fit, else one where two fit, else None: the row tile cannot run."""
    exchange = row_tile * (TILE_N + 1 + TILE_N // 8) * 4  # and per row a root, and sums of squares
    for units, least in ((2, 3), (1, 2)):
        unit = TILE_N * UNIT_K // 2 + 2 * TILE_N + (TILE_N if zeros else 0)
        stage = units * unit + row_tile * (units * 2 * UNIT_K + 16)
        stages = min(MAX_STAGES, (shared_limit - 2048 - exchange) // (K_GROUPS * stage))
        if stages >= least:
            return Ring(units, stages, K_GROUPS * stages * stage + exchange)
    return None


def parts_of(width: int) -> int:
    """How many sums of squares stand for a row of `width` columns: one per 64, for whole tiles."""
    return -(-width // TILE_N) * (TILE_N // PART_N)


@dataclass(frozen=True)
class Squares:
    """What is missing from rows that were multiplied by an RMS norm's factor only: sums of their squares.

    values fp32 [>= rows, `parts_of(width)`], one sum per 64 columns; a row's root is rsqrt(sum / width + eps).
    """

    values: torch.Tensor
    width: int
    eps: float


@dataclass(frozen=True)
class Residual:
    """Where a product adds its result: x [T, N] bf16 in place. It then returns x * factor [N] and fills `squares`."""

    x: torch.Tensor
    factor: torch.Tensor
    squares: torch.Tensor


class Workspace:
    """Partial tiles and arrival counters of the products that run on one stream."""

    def __init__(self, device: torch.device, max_tiles: int = 4096) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.ctas = properties.multi_processor_count
        self.arch = properties.major * 10 + properties.minor
        self.shared_limit = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in torch's stubs
        self.row_tiles = tuple(m for m in ROW_TILES if plan_ring(m, True, self.shared_limit) is not None)
        size = self.ctas * 2 * max(self.row_tiles) * TILE_N  # of a run's first tile and of its last
        self.partials = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(max_tiles, dtype=torch.int32, device=device)


class W4Product:
    """y = x W^T for bf16 rows over a packed 4-bit weight.

    Rows run in tiles of 8, 16 or 32 (the smallest that holds them); more than the largest tile run as
    several launches. `dependent` launches with programmatic stream serialization (sm_90+): the weights of
    the first stages are fetched while the kernel before is still running.
    """

    def __init__(
        self,
        weight: PackedW4,
        workspace: Workspace,
        dependent: bool | None = None,
        cache_directory: Path | None = None,
    ) -> None:
        self.weight, self.workspace = weight, workspace
        self.dependent = workspace.arch >= 90 if dependent is None else dependent
        self._cache = cache_directory
        if weight.words.shape[0] > workspace.arrivals.numel():
            raise ValueError(f"{weight.words.shape[0]} tiles, but the workspace counts {workspace.arrivals.numel()}")

    def _kernel(self, row_tile: int) -> nvrtc.Kernel:
        space, zeros = self.workspace, self.weight.zeros is not None
        ring = plan_ring(row_tile, zeros, space.shared_limit)
        assert ring is not None, row_tile
        macros = {
            "MT": row_tile,
            "U": ring.units,
            "STAGES": ring.stages,
            "HAS_ZEROS": int(zeros),
            "SCALE_BF16": int(self.weight.scales.dtype == torch.bfloat16),
            "PDL": int(self.dependent),
            "WM": m_tiles_per_warp(row_tile),
        }
        return nvrtc.load(
            "w4a16", "w4a16", space.arch, tuple(macros.items()), threads(row_tile), ring.shared,
            SIGNATURE, self.dependent, self._cache,
        )  # fmt: skip

    def warm(self) -> None:
        """Compile and load every row tile's kernel now."""
        for row_tile in self.workspace.row_tiles:
            self._kernel(row_tile)

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        squares: Squares | None = None,
        gated: bool = False,
        residual: Residual | None = None,
    ) -> torch.Tensor:
        """x bf16 [M, K], row stride any multiple of 8 -> bf16 [M, N].

        squares   what x lacks of its RMS norm
        gated     silu(first half) * second half, [M, N / 2]; the weight must be paired
        residual  add to it, and return its rows with the next norm's factor; not for a paired weight
        """
        w, (n, k) = self.weight, self.weight.shape
        rows = x.shape[0]
        if x.dtype != torch.bfloat16 or x.shape[1] != k or x.stride(1) != 1 or x.stride(0) % 8:
            raise ValueError(f"w4a16 needs contiguous bf16 rows of {k}, got {x.dtype} {tuple(x.shape)} {x.stride()}")
        if (gated and not w.paired) or (residual is not None and w.paired):
            raise ValueError("w4a16: SiLU needs a paired weight, a residual one that is not")
        if out is None:
            out = torch.empty(rows, n // 2 if gated else n, dtype=torch.bfloat16, device=x.device)
        if residual is not None and (residual.x.stride() != out.stride() or not residual.squares.is_contiguous()):
            raise ValueError("w4a16: residual and output must be laid out alike, squares without gaps")
        if squares is not None and (squares.values.shape[1] > MAX_PARTS or squares.values.stride(0) % 4):
            raise ValueError(f"w4a16: sums of squares {tuple(squares.values.shape)}: at most {MAX_PARTS}, in fours")
        if residual is not None and residual.squares.shape[1] < parts_of(n):
            raise ValueError(f"w4a16: {residual.squares.shape[1]} sums of squares a row do not hold {n} columns")
        if residual is not None and squares is not None and residual.squares.stride(0) != squares.values.stride(0):
            raise ValueError("w4a16: squares read and squares written must have one row stride")
        epilogue = 3 if residual is not None else int(w.paired) + gated
        sums = squares.values if squares is not None else residual.squares if residual is not None else None
        stream = torch.cuda.current_stream(x.device).cuda_stream
        largest = self.workspace.row_tiles[-1]
        for first in range(0, rows, largest):
            count = min(largest, rows - first)
            row_tile = next(m for m in self.workspace.row_tiles if m >= count)
            self._kernel(row_tile).launch(
                self.workspace.ctas,
                (
                    w.words.data_ptr(),
                    w.scales.data_ptr(),
                    0 if w.zeros is None else w.zeros.data_ptr(),
                    x.data_ptr() + 2 * first * x.stride(0),
                    self.workspace.partials.data_ptr(),
                    self.workspace.arrivals.data_ptr(),
                    count,
                    x.stride(0),
                    k // UNIT_K,
                    w.group_units.bit_length() - 1,
                    *divmod(w.words.shape[0] * (k // UNIT_K), self.workspace.ctas),
                    out.data_ptr() + 2 * first * out.stride(0),
                    n,
                    out.stride(0),
                    0 if squares is None else squares.values.data_ptr() + 4 * first * squares.values.stride(0),
                    0 if squares is None else squares.values.shape[1],
                    1.0 if squares is None else float(squares.width),
                    0.0 if squares is None else squares.eps,
                    epilogue,
                    0 if residual is None else residual.x.data_ptr() + 2 * first * out.stride(0),
                    0 if residual is None else residual.factor.data_ptr(),
                    0 if residual is None else residual.squares.data_ptr() + 4 * first * residual.squares.stride(0),
                    0 if sums is None else sums.stride(0),
                ),
                stream,
            )
        return out


def plan_prefill(zeros: bool, shared_limit: int, arch: int) -> tuple[str, int, int]:
    """(source, dynamic shared memory, stages) of the prefill kernel: the bits depend on the source alone."""
    stage = TILE_N * UNIT_K // 2 + W4Prefill.TILE * 2 * UNIT_K + 2 * TILE_N + (TILE_N if zeros else 0) + 16
    if arch == 90:
        stages = min(6, (shared_limit - 1024) // stage)  # the rows' ring is aligned to 1,024
        return "w4a16_prefill_wgmma", 1024 + stages * stage, stages
    stages = min(4, shared_limit // stage)
    return "w4a16_prefill", max(stages * stage, W4Prefill.TILE * (TILE_N + 8) * 2), stages


class W4Prefill:
    """The prefill product over the same packed weight: any number of rows, one tile (128 x 256), one K order."""

    TILE = 128

    def __init__(self, weight: PackedW4, workspace: Workspace, cache_directory: Path | None = None) -> None:
        self.weight, self.workspace, self._cache = weight, workspace, cache_directory

    def _kernel(self) -> nvrtc.Kernel:
        zeros = self.weight.zeros is not None
        source, shared, stages = plan_prefill(zeros, self.workspace.shared_limit, self.workspace.arch)
        macros = {
            "STAGES": stages,
            "HAS_ZEROS": int(zeros),
            "SCALE_BF16": int(self.weight.scales.dtype == torch.bfloat16),
        }
        return nvrtc.load(
            source, "w4a16_prefill", self.workspace.arch, tuple(macros.items()), 256, shared,
            "ppppp" + "iiiiiiii", False, self._cache,
        )  # fmt: skip

    def warm(self) -> None:
        """Compile and load the kernel now."""
        self._kernel()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x bf16 [M, K], row stride any multiple of 8 -> bf16 [M, N]."""
        n, k = self.weight.shape
        rows = x.shape[0]
        if x.dtype != torch.bfloat16 or x.shape[1] != k or x.stride(1) != 1 or x.stride(0) % 8:
            raise ValueError(f"w4a16 needs contiguous bf16 rows of {k}, got {x.dtype} {tuple(x.shape)} {x.stride()}")
        y = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device) if out is None else out
        w, m_tiles = self.weight, -(-rows // self.TILE)
        self._kernel().launch(
            m_tiles * w.words.shape[0],
            (
                w.words.data_ptr(),
                w.scales.data_ptr(),
                0 if w.zeros is None else w.zeros.data_ptr(),
                x.data_ptr(),
                y.data_ptr(),
                rows,
                n,
                x.stride(0),
                y.stride(0),
                m_tiles,
                k // UNIT_K,
                w.group_units,
                int(w.paired),
            ),
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        return y
