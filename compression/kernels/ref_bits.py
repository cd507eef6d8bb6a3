"""numpy kernels: fixed-tree sums, bit planes, sign x mean, rotation codecs.

A lane sum adds x[0::16], x[1::16], ... in 16 float64 lanes from first to last element, then folds the lanes
8, 4, 2, 1: one fixed order of additions, whatever the machine's vector width. A bit plane of a block of B
values is B/8 bytes; bit j of byte i belongs to value i + j * B/8, which needs no shuffling on any machine.
"""

from __future__ import annotations

import numpy as np

from compression.rng import hash32, stream_key

LANES = 16
TINY = np.float32(2.0**-126)


def lane_sum(rows: np.ndarray) -> np.ndarray:
    """(blocks, B) float64 -> (blocks,) sums in the fixed order."""
    lanes = np.zeros((rows.shape[0], LANES))
    cells = rows.reshape(rows.shape[0], -1, LANES)
    for step in range(cells.shape[1]):
        lanes += cells[:, step]
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    return lanes[:, 0]


def pack_plane(bits: np.ndarray) -> np.ndarray:
    """(blocks, B) of 0/1 -> (blocks, B/8) uint8."""
    planes = bits.astype(np.uint8).reshape(bits.shape[0], 8, -1)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    return np.bitwise_or.reduce(planes << shifts, axis=1)


def unpack_plane(packed: np.ndarray) -> np.ndarray:
    """(blocks, B/8) uint8 -> (blocks, B) of 0/1, uint8."""
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    return ((packed[:, None, :] >> shifts) & np.uint8(1)).reshape(packed.shape[0], -1)


def sign_encode(x: np.ndarray, block: int, counts: np.ndarray, means: np.ndarray, packed: np.ndarray) -> int:
    """mean |x| per block (fp32) and one bit per value, set where x < 0.

    Block b holds `counts[b]` values, zeros behind. Returns -1 or the first block with a non-finite
    value.
    """
    rows = x.reshape(-1, block)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        return int(np.argmin(finite))
    mean = (lane_sum(np.abs(rows).astype(np.float64)) / np.maximum(counts, 1)).astype(np.float32)
    usable = mean >= TINY
    means[:] = np.where(usable, mean, np.float32(0))
    packed.reshape(rows.shape[0], -1)[:] = pack_plane((rows < 0) & usable[:, None])
    return -1


def sign_decode(means: np.ndarray, packed: np.ndarray, block: int, out: np.ndarray) -> int:
    """Returns -1 or the first block whose mean is neither a normal positive number nor zero with zero
    bits."""
    rows = packed.reshape(-1, block // 8)
    good = (means >= TINY) & np.isfinite(means)
    good |= (means.view(np.uint32) == 0) & ~rows.any(axis=1)
    if not good.all():
        return int(np.argmin(good))
    signs = np.float32(1) - np.float32(2) * unpack_plane(rows).astype(np.float32)
    out.reshape(-1, block)[:] = means[:, None] * signs
    return -1


def hadamard(rows: np.ndarray) -> np.ndarray:
    """Orthonormal Walsh-Hadamard transform of every row (length 4^k), butterflies from the widest stride
    down."""
    size = rows.shape[1]
    stride = size // 2
    y = rows
    while stride:
        pairs = y.reshape(rows.shape[0], -1, 2, stride)
        total = np.empty_like(pairs)
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=total[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=total[:, :, 1])
        y = total.reshape(rows.shape)
        stride //= 2
    return y * np.float32(size**-0.5)  # a power of two for sizes 4^k: exact


def random_signs(start: int, shape: tuple[int, int], seed: int, turn: int) -> np.ndarray:
    """+1 or -1 per element from the top bit of the counter generator, float32."""
    count = shape[0] * shape[1]
    index = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
    top = hash32(index, stream_key(seed, turn)) >> np.uint32(31)
    return (np.float32(1) - np.float32(2) * top.astype(np.float32)).reshape(shape)


def rotate(x: np.ndarray, block: int, rounds: int, start: int, seed: int) -> np.ndarray:
    """`rounds` times: random signs, then Hadamard. Returns (blocks, B) float32."""
    rows = x.reshape(-1, block)
    for turn in range(rounds):
        rows = hadamard(rows * random_signs(start, rows.shape, seed, turn))
    return rows


def rotate_back(rows: np.ndarray, rounds: int, start: int, seed: int) -> np.ndarray:
    """Inverse of `rotate`."""
    for turn in reversed(range(rounds)):
        rows = hadamard(rows) * random_signs(start, rows.shape, seed, turn)
    return rows


def lm_encode(
    y: np.ndarray,
    block: int,
    levels: np.ndarray,
    cuts: np.ndarray,
    unbiased: bool,
    scales: np.ndarray,
    packed: np.ndarray,
) -> int:
    """Nearest Lloyd-Max level of y * sqrt(B) / ||y|| per block; `packed` holds the bit planes, sign plane
    last.

    scale = <y,q>/||q||^2 (contractive) or ||y||^2/<y,q> (unbiased), fp32. Returns -1 or the first block whose
    scale overflows.
    """
    rows = y.reshape(-1, block)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        size = np.abs(rows)
        energy = lane_sum(rows.astype(np.float64) * rows.astype(np.float64))
        sigma = np.sqrt(energy / block)
        index = np.zeros(rows.shape, np.uint8)
        for cut in cuts:
            index += size >= (sigma * cut).astype(np.float32)[:, None]
        chosen = levels[index]
        along = lane_sum(size.astype(np.float64) * chosen)
        scale = energy / along if unbiased else along / lane_sum(chosen * chosen)
        scale = scale.astype(np.float32)
    usable = (scale >= TINY) & (energy > 0)
    bad = ~np.isfinite(energy) | (usable & ~np.isfinite(scale * np.float32(levels[-1])))
    if bad.any():
        return int(np.argmax(bad))
    scales[:] = np.where(usable, scale, np.float32(0))
    planes = packed.reshape(rows.shape[0], -1, block // 8)
    num_planes = planes.shape[1]
    for plane in range(num_planes - 1):
        planes[:, plane] = pack_plane(((index >> plane) & 1) * usable[:, None])
    planes[:, num_planes - 1] = pack_plane((rows < 0) & usable[:, None])
    return -1


def lm_decode(scales: np.ndarray, packed: np.ndarray, block: int, levels: np.ndarray, out: np.ndarray) -> int:
    """Rotated values q * scale into `out` (float32). Returns -1 or the first block with a bad scale."""
    planes = packed.reshape(scales.size, -1, block // 8)
    num_planes = planes.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        good = (scales >= TINY) & np.isfinite(scales * np.float32(levels[-1]))
    good |= (scales.view(np.uint32) == 0) & ~planes.any(axis=(1, 2))
    if not good.all():
        return int(np.argmin(good))
    index = np.zeros((scales.size, block), np.uint8)
    for plane in range(num_planes - 1):
        index |= unpack_plane(planes[:, plane]) << np.uint8(plane)
    signs = np.float32(1) - np.float32(2) * unpack_plane(planes[:, num_planes - 1]).astype(np.float32)
    out.reshape(-1, block)[:] = (levels.astype(np.float32)[index] * scales[:, None]) * signs
    return -1
