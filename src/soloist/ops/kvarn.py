"""KVarN k4v2: tiles of 128 tokens, rotated, variance-normalised, 4-bit keys and 2-bit values.

The arithmetic of one tile (spec/kv_formats.md section 5), in fp32. A tile of one KV head and layer becomes
one record of `record_bytes(D)` bytes; what a row may read of it is decided elsewhere (`cache/tiles.py`). The kernels
are in `ops/triton/kvarn.py`; a card keeps all keys and values turned by the Hadamard matrix, packed or not.

What can go wrong: fp16 scales underflow for constant channels. The floor of 1e-10 then becomes 0 and the zero
point alone reproduces the value, which is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

TILE = 128
WINDOW = 3 * TILE  # unpacked tokens of a request: the first tile, and a ring of two
ITERATIONS = 8
BITS_K, BITS_V = 4, 2


@dataclass(frozen=True)
class StoredTiles:
    """A layer's tiles, or all layers' with one more dimension in front.

    records             uint8 [pages * 64, kv * record_bytes(D) / 128]; pages 2 i and 2 i + 1 hold the kv records of one
                        tile, one after the other
    window_k, window_v  [slots, WINDOW, kv, D]: unpacked tokens, position p at `lane(p)`
    """

    records: torch.Tensor
    window_k: torch.Tensor
    window_v: torch.Tensor


def lane(positions: torch.Tensor) -> torch.Tensor:
    """Where positions lie in a slot's window."""
    return torch.where(positions < TILE, positions, TILE + (positions - TILE) % (2 * TILE))


@cache
def hadamard(size: int) -> torch.Tensor:
    """The normalised Sylvester matrix [size, size], symmetric and its own inverse; `size` a power of two."""
    if size & (size - 1) or size < 1:
        raise ValueError(f"a Hadamard matrix of size {size} does not exist here: it must be a power of two")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def _log_std(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.std(dim, keepdim=True).clamp(1e-3, 1e3).log()


def _imbalance(x: torch.Tensor) -> torch.Tensor:
    """Spread of the column deviations plus spread of the row deviations, [..., 1, 1]; not a number counts as worst."""
    columns, rows = x.std(-2, keepdim=True), x.std(-1, keepdim=True)
    total = columns.amax(-1, keepdim=True) / columns.amin(-1, keepdim=True)
    total = total + rows.amax(-2, keepdim=True) / rows.amin(-2, keepdim=True)
    return torch.where(total.isnan(), torch.inf, total)


def normalise(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log scales (lc [..., 1, C], lr [..., R, 1]) of m [..., R, C] that make all rows and columns vary alike.

    Eight alternating corrections; the state with the least imbalance counts, the later of equals, the start included.
    """
    lc = m.new_zeros(*m.shape[:-2], 1, m.shape[-1])
    lr = m.new_zeros(*m.shape[:-1], 1)
    best_c, best_r, least = lc, lr, _imbalance(m)
    for _ in range(ITERATIONS):
        lc = (lc + _log_std(m * (-lc - lr).exp(), -2)).clamp(-0.3, 10.0)
        lr = (lr + _log_std(m * (-lc - lr).exp(), -1)).clamp(-0.3, 10.0)
        now = _imbalance(m * (-lc - lr).exp())
        better = now <= least
        best_c, best_r = torch.where(better, lc, best_c), torch.where(better, lr, best_r)
        least = torch.where(better, now, least)
    return best_c, best_r


def quantise(m: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """m [..., R, C] -> codes uint8 [..., R, C], a and zp fp16 [..., R], c fp16 [..., C]: m ~ (code * a + zp) * c."""
    lc, lr = normalise(m)
    balanced = m * (-lc - lr).exp()
    top = 2**bits - 1
    low, high = balanced.amin(-1, keepdim=True), balanced.amax(-1, keepdim=True)
    step = ((high - low) / top).clamp_min(1e-10)
    codes = ((balanced - low) / step).round().clamp(0, top).to(torch.uint8)
    rows, columns = lr.exp(), lc.exp()
    a, zp = (rows * step).squeeze(-1), (rows * low).squeeze(-1)
    return codes, a.to(torch.float16), zp.to(torch.float16), columns.squeeze(-2).to(torch.float16)


def dequantise(codes: torch.Tensor, a: torch.Tensor, zp: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The fp32 matrix [..., R, C] that codes and scales stand for."""
    return (codes.float() * a.float().unsqueeze(-1) + zp.float().unsqueeze(-1)) * c.float().unsqueeze(-2)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., C] -> bytes [..., C * bits / 8]: value c in byte c // n, bit (c % n) bits, n = 8 / bits."""
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (-1, per_byte))
    packed = parts[..., 0].clone()
    for i in range(1, per_byte):
        packed |= parts[..., i] << (i * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`."""
    mask = 2**bits - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def fields(dim: int) -> dict[str, tuple[int, int]]:
    """Byte offset and length of every field of a record for head size `dim`."""
    lengths = {
        "k.codes": dim * TILE * BITS_K // 8,
        "k.a": 2 * dim,
        "k.zp": 2 * dim,
        "k.c": 2 * TILE,
        "v.codes": TILE * dim * BITS_V // 8,
        "v.c": 2 * dim,
        "v.a": 2 * TILE,
        "v.zp": 2 * TILE,
    }
    out, at = {}, 0
    for name, length in lengths.items():
        out[name] = (at, length)
        at += length
    return out


def record_bytes(dim: int) -> int:
    """Bytes of one tile of one head: 26,880 for D = 256, a multiple of 128 for D a multiple of 64."""
    return sum(length for _, length in fields(dim).values())


def _bytes(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).reshape(heads, -1)


def encode_tile(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K, V [128, heads, D] -> records uint8 [heads, record_bytes(D)]."""
    matrix = hadamard(k.shape[2]).to(k.device)
    return encode_turned((k.float().transpose(0, 1) @ matrix), (v.float().transpose(0, 1) @ matrix))


def encode_turned(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K and V fp32 [heads, 128, D], already multiplied by the Hadamard matrix -> records [heads, record_bytes(D)]."""
    kq, ka, kzp, kc = quantise(k.transpose(1, 2).contiguous(), BITS_K)  # rows are channels
    vq, va, vzp, vc = quantise(v, BITS_V)  # rows are tokens
    parts = (pack(kq, BITS_K), ka, kzp, kc, pack(vq, BITS_V), vc, va, vzp)
    return torch.cat([_bytes(part, k.shape[0]) for part in parts], 1)


def decode_turned(records: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """records uint8 [tiles, heads, record_bytes(D)] -> K, V fp32 [tiles, heads, 128, D], still turned."""
    tiles, heads, _ = records.shape
    where = fields(dim)

    def field(name: str, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        at, length = where[name]
        return records[..., at : at + length].contiguous().view(dtype).view(tiles, heads, *shape)

    kq = unpack(field("k.codes", dim, TILE // 2, dtype=torch.uint8), BITS_K)
    vq = unpack(field("v.codes", TILE, dim // 4, dtype=torch.uint8), BITS_V)
    key = dequantise(kq, field("k.a", dim), field("k.zp", dim), field("k.c", TILE)).transpose(2, 3)
    return key, dequantise(vq, field("v.a", TILE), field("v.zp", TILE), field("v.c", dim))


def decode_tiles(records: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """records uint8 [tiles, heads, record_bytes(D)] -> K, V fp32 [tiles * 128, heads, D], turned back."""
    tiles, heads, _ = records.shape
    matrix = hadamard(dim).to(records.device)

    def straight(x: torch.Tensor) -> torch.Tensor:
        return (x @ matrix).transpose(1, 2).reshape(tiles * TILE, heads, dim)

    key, value = decode_turned(records, dim)
    return straight(key), straight(value)
