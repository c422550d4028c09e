"""What changed between two versions of a tensor, in few bytes.

Between two steps of reinforcement learning most elements of a bfloat16 parameter keep their bits,
because an update of 1e-6 is less than half the distance to the next number. A delta has one bit per
element, which says whether it changed, and for those that changed the difference of their bits as
integers. Numbers that are close have close bits, so these differences are small. Both parts are
compressed with Zstandard.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
import zstandard

_SIZES = struct.Struct("<QQ")
"""Elements of the tensor, and bytes of the compressed mask."""
DIGEST_ROW = 2**13
"""Elements that a digest sums at a time."""
_LEVEL = 3
"""Higher levels take several times as long and save a tenth."""


def encode_delta(base: torch.Tensor, new: torch.Tensor) -> bytes:
    """The change from `base` to `new`, both [n] float32 on the host."""
    differences = _bits(new) - _bits(base)  # wraps around, and so does adding it again
    has_changed = differences != 0
    changes = differences[has_changed]
    # the bytes of one significance next to each other: most of those planes are constant
    planes = changes.view(np.uint8).reshape(-1, 4).T.tobytes()
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    mask = compressor.compress(np.packbits(has_changed).tobytes())
    return _SIZES.pack(len(new), len(mask)) + mask + compressor.compress(planes)


def apply_delta(base: torch.Tensor, delta: bytes) -> torch.Tensor:
    """The tensor that `delta` was encoded from, [n] float32, if `base` is the same as then.

    Raises ValueError if the delta is damaged or belongs to a tensor of another size.
    """
    if len(delta) < _SIZES.size:
        raise ValueError(f"a delta of {len(delta)} bytes")
    size, mask_bytes = _SIZES.unpack_from(delta)
    if size != len(base):
        raise ValueError(f"a delta of {size} elements for a tensor of {len(base)}")
    parts = memoryview(delta)[_SIZES.size :]
    mask = np.unpackbits(_decompressed(parts[:mask_bytes], -(-size // 8)), count=size)
    has_changed = mask.view(np.bool_)
    bits = _bits(base).copy()
    bits[has_changed] += _changes(parts[mask_bytes:], int(has_changed.sum()))
    return torch.from_numpy(bits.view(np.float32))


def _changes(planes: memoryview, count: int) -> np.ndarray:
    """Differences of bits, [count] int32, from their bytes in planes."""
    table = _decompressed(planes, 4 * count).reshape(4, count)
    return np.ascontiguousarray(table.T).reshape(-1).view(np.int32)


def _bits(numbers: torch.Tensor) -> np.ndarray:
    return numbers.numpy().view(np.int32)


def _decompressed(data: memoryview, size: int) -> np.ndarray:
    """`size` bytes. Raises ValueError if there are fewer or more."""
    try:
        if zstandard.frame_content_size(data) != size:
            raise ValueError("a delta that is damaged")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError("a delta that is damaged") from error


def digest(flat: torch.Tensor) -> list[int]:
    """Sum of the bits of [n] float32, and sum of their products with their positions, modulo 2^64:
    a changed element changes the first, two swapped elements the second.
    The elements are not copied."""
    bits = flat.view(torch.int32)
    rows = len(bits) // DIGEST_ROW
    table, rest = bits[: rows * DIGEST_ROW].view(rows, DIGEST_ROW), bits[rows * DIGEST_ROW :]
    of_rows, of_columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    placed = _placed(of_rows) * DIGEST_ROW + _placed(of_columns)
    placed += _placed(rest.long()) + rest.sum() * rows * DIGEST_ROW
    return [int(of_rows.sum() + rest.sum()), int(placed)]


def _placed(sums: torch.Tensor) -> torch.Tensor:
    """The sum of [n] integers, each times its index."""
    return (sums * torch.arange(len(sums), device=sums.device)).sum()
