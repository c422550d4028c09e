"""What is in samples, in a form that compares, and where two readings of a dataset differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlcli.api.data import SequenceSample

Record = dict[str, Any]
"""What is in a sample, in a form that compares exactly."""
SHOWN = 40
"""Characters of a value in a message."""


def first_difference(ones: Sequence[Record], others: Sequence[Record]) -> str:
    """Where two readings of a dataset first differ; empty if they do not."""
    if len(ones) != len(others):
        return f"{len(ones)} rows, then {len(others)}"
    for index, (first, second) in enumerate(zip(ones, others, strict=True)):
        mismatch = difference(first, second)
        if mismatch:
            return f"row {index}: {mismatch}"
    return ""


def difference(first: Record, second: Record) -> str:
    """Where two records differ, in words; empty if they do not."""
    for name in {**first, **second}:
        value, changed = first.get(name), second.get(name)
        if value != changed:
            texts = repr(value), repr(changed)
            pairs = enumerate(zip(*texts, strict=False))
            end = min(map(len, texts))
            parting = next((position for position, (a, b) in pairs if a != b), end)
            return f"{name} is {excerpt(texts[0], parting)}, then {excerpt(texts[1], parting)}"
    return ""


def excerpt(text: str, position: int) -> str:
    """The characters of a long text around a position."""
    start = max(0, position - SHOWN // 2) if len(text) > SHOWN else 0
    return f"{'…' if start else ''}{text[start : start + SHOWN]}"


def records(samples: Iterable[SequenceSample]) -> list[Record]:
    """Their ids and contents."""
    return [{"its id": id_of(sample), **content_of(sample)} for sample in samples]


def contents(samples: Iterable[SequenceSample]) -> list[Record]:
    return [content_of(sample) for sample in samples]


def content_of(sample: SequenceSample) -> Record:
    """Everything in a sample except its id."""
    encoded = sample.as_json()
    types, data = encoded["dtypes"], encoded["data"] or {}
    content = {"keys": encoded["keys"]}
    content |= {f"{key} ({types[key]})": values for key, values in data.items()}
    content |= {f"lengths of {key}": lengths for key, lengths in encoded["seqlens"].items()}
    return content | {f"metadata {name}": values for name, values in encoded["metadata"].items()}


def ids_of(samples: Iterable[SequenceSample]) -> list[Any]:
    return [id_of(sample) for sample in samples]


def id_of(sample: SequenceSample) -> Any:
    return sample.ids[0]
