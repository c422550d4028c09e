"""A `SequenceSample` as JSON: numbers as lists, dtypes by name. Every bit survives,
except NaN payloads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only data.py imports this file

if TYPE_CHECKING:
    from rlcli.api.data import SequenceSample

_FIELDS = frozenset({"ids", "keys", "seqlens", "trailing_shapes", "dtypes", "data", "metadata"})

_DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name in (
        *("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
CARRIED = frozenset(_NAMES)
"""The dtypes that can be sent between ranks."""
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(sample: SequenceSample) -> dict[str, Any]:
    """Non-finite numbers become the strings "nan", "inf" and "-inf",
    which strict JSON can carry."""
    odd = [id_ for id_ in sample.ids if isinstance(id_, bool) or not isinstance(id_, str | int)]
    if odd:
        raise ValueError(
            f"ids that are neither strings nor ints cannot be written as JSON: {odd[:5]}"
        )
    lengths = {key: [list(inner) for inner in outer] for key, outer in sample.seqlens.items()}
    shapes = {
        key: None if shape is None else list(shape) for key, shape in sample.trailing_shapes.items()
    }
    dtypes = {key: None if dtype is None else _name(dtype) for key, dtype in sample.dtypes.items()}
    data = None
    if sample.data is not None:
        data = {key: _numbers(tensor) for key, tensor in sample.data.items()}
    return {
        "ids": list(sample.ids),
        "keys": list(sample.keys),
        "seqlens": lengths,
        "trailing_shapes": shapes,
        "dtypes": dtypes,
        "data": data,
        "metadata": {name: list(values) for name, values in sample.metadata.items()},
    }


def decode(cls: type[SequenceSample], encoded: Mapping[str, Any]) -> SequenceSample:
    """The constructor checks everything but the names of dtypes and the numbers,
    which are checked here."""
    if not isinstance(encoded, Mapping) or encoded.keys() != _FIELDS:
        description = sorted(encoded) if isinstance(encoded, Mapping) else type(encoded).__name__
        raise ValueError(f"a sample as JSON has the fields {sorted(_FIELDS)}, not {description}")
    dtypes = {
        key: None if name is None else _dtype(name) for key, name in encoded["dtypes"].items()
    }
    described = cls(
        ids=encoded["ids"],
        keys=encoded["keys"],
        seqlens=encoded["seqlens"],
        trailing_shapes=encoded["trailing_shapes"],
        dtypes=dtypes,
        metadata=encoded["metadata"],
    )
    if encoded["data"] is None:
        return described
    return cls(
        ids=described.ids,
        keys=described.keys,
        seqlens=described.seqlens,
        trailing_shapes=described.trailing_shapes,
        dtypes=dtypes,
        data={key: _tensor(key, numbers, described) for key, numbers in encoded["data"].items()},
        metadata=described.metadata,
    )


def _name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"tensors of {dtype} cannot be written as JSON")
    return _NAMES[dtype]


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{name!r} is not the name of a dtype; the names are {sorted(_DTYPES)}")
    return _DTYPES[name]


def _numbers(tensor: torch.Tensor | None) -> list[Any] | None:
    if tensor is None:
        return None
    _name(tensor.dtype)
    flat = tensor.detach().reshape(-1)
    if not tensor.is_floating_point():
        return flat.tolist()
    return [x if math.isfinite(x) else str(x) for x in flat.to(torch.float64).tolist()]


def _tensor(key: str, numbers: Any, described: SequenceSample) -> torch.Tensor | None:
    """float64 holds every value of the narrower floats, so the round trip is exact."""
    if numbers is None:
        return None
    dtype, shape = described.dtypes.get(key), described.trailing_shapes.get(key)
    if dtype is None or shape is None:
        raise ValueError(f"data of {key!r} comes without a dtype or trailing shape")
    kind = bool if dtype is torch.bool else int
    kinds: tuple[type, ...] = (int, float, str) if dtype.is_floating_point else (kind,)
    if not isinstance(numbers, list) or any(type(number) not in kinds for number in numbers):
        raise ValueError(f"data of {key!r} is not a list of numbers of dtype {dtype}")
    rows = sum(sum(inner) for inner in described.seqlens[key])
    if len(numbers) != rows * math.prod(shape):
        raise ValueError(
            f"data of {key!r} has {len(numbers)} numbers for {rows} rows of shape {shape}"
        )
    if dtype.is_floating_point:
        floats = [
            _NON_FINITE[n] if isinstance(n, str) and n in _NON_FINITE else float(n) for n in numbers
        ]
        return torch.tensor(floats, dtype=torch.float64).to(dtype).reshape(rows, *shape)
    return torch.tensor(numbers, dtype=dtype).reshape(rows, *shape)
