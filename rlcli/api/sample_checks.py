"""Reading the fields that a `SequenceSample` is built from,
and checking the arguments of its operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.api.lengths import is_tensor, read_length, read_lengths, rows_of

if TYPE_CHECKING:
    import torch

    from rlcli.api.data import SequenceSample


class KeySet(frozenset[str]):
    """A set of keys that iterates in alphabetical order: the same on every rank,
    under every hash seed."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def read_fields(sample: SequenceSample) -> None:
    """Convert the constructor's arguments to their final form;
    raises ValueError if they are inconsistent."""
    sample.ids = read_ids(sample.ids)
    _read_seqlens(sample)
    if sample.data is not None:
        sample.data = dict(by_name(sample.data, "data"))
        _same_keys(sample, "data", sample.data)
    sample.dtypes = _read_traits(sample, "dtypes", sample.dtypes, lambda tensor: tensor.dtype)
    shapes = _read_traits(
        sample, "trailing_shapes", sample.trailing_shapes, lambda tensor: tensor.shape[1:]
    )
    sample.trailing_shapes = {
        key: None if s is None else _read_shape(s, key) for key, s in shapes.items()
    }
    for key in sample.keys:
        _check_tensor(sample, key, None if sample.data is None else sample.data[key])
    sample.metadata = {
        name: _read_entries(sample, name, entries)
        for name, entries in by_name(sample.metadata, "metadata")
    }


def _read_seqlens(sample: SequenceSample) -> None:
    """`seqlens` and `keys`, which are those of `seqlens` unless they are given."""
    items = by_name(sample.seqlens, "seqlens")
    sample.seqlens = {key: read_lengths(lengths, f"seqlens of {key!r}") for key, lengths in items}
    sample.keys = read_keys(sample.seqlens if sample.keys is None else sample.keys)
    _same_keys(sample, "seqlens", sample.seqlens)
    for key, lengths in sample.seqlens.items():
        if len(lengths) != sample.bs:
            hint = (
                "; with several sequences to a sample, give a list for each "
                "sample: [[1, 1], [1, 1]]"
            )
            several = hint if sample.bs and len(lengths) > sample.bs else ""
            raise ValueError(
                f"seqlens of {key!r} are for {len(lengths)} samples, not for {sample.bs}{several}"
            )


def _read_entries(sample: SequenceSample, name: str, entries: Any) -> list[Any]:
    """The metadata of a name, one entry per sample."""
    if not isinstance(entries, list):
        raise ValueError(
            f"metadata {name!r} must be a list, one entry per sample, not {entries!r:.60}"
        )
    if len(entries) != sample.bs:
        raise ValueError(f"metadata {name!r} has {len(entries)} entries for {sample.bs} samples")
    return list(entries)


def _same_keys(sample: SequenceSample, subject: str, mapping: Mapping[str, Any]) -> None:
    names = set(mapping)
    if names ^ sample.keys:
        missing, extra = sorted(sample.keys - names), sorted(names - sample.keys)
        raise ValueError(f"{subject} and keys differ: missing {missing}, unexpected {extra}")


def _read_traits(
    sample: SequenceSample, subject: str, traits_given: Any, of: Callable[[torch.Tensor], Any]
) -> dict[str, Any]:
    """`dtypes` or `trailing_shapes` as given, or else taken from the tensors."""
    if traits_given is not None:
        traits = dict(by_name(traits_given, subject))
        _same_keys(sample, subject, traits)
        return traits
    if sample.data is None:
        if sample.keys:
            raise ValueError(f"{subject} cannot be inferred without data")
        return {}
    return {key: of(t) if is_tensor(t) else None for key, t in sample.data.items()}


def _check_tensor(sample: SequenceSample, key: str, tensor: Any) -> None:
    import torch

    dtype, shape = sample.dtypes[key], sample.trailing_shapes[key]
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of {key!r} is {dtype!r}, not a torch.dtype")
    if tensor is None:
        return
    if not is_tensor(tensor):
        raise ValueError(f"data of {key!r} is a {type(tensor).__name__}, not a tensor")
    if tensor.dtype != dtype:
        raise ValueError(f"data of {key!r} has dtype {tensor.dtype}, but dtypes say {dtype}")
    expected = None if shape is None else (rows_of(sample.seqlens[key]), *shape)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"data of {key!r} has shape {tuple(tensor.shape)}, expected {expected}")


def by_name(mapping: Any, subject: str) -> list[tuple[str, Any]]:
    """The items in alphabetical order, so that all ranks iterate over keys in the same order."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{subject} is a {type(mapping).__name__}, not a mapping from names")
    if not all(isinstance(name, str) for name in mapping):
        odd = [name for name in mapping if not isinstance(name, str)]
        raise ValueError(f"{subject} has names that are not strings: {odd}")
    return sorted(mapping.items())


def read_keys(keys: Iterable[str]) -> KeySet:
    if isinstance(keys, str):
        raise ValueError(f"keys is the string {keys!r}; give a list or set of keys")
    listed = list(keys)
    if not all(isinstance(key, str) for key in listed):
        raise ValueError(f"keys must be strings: {listed}")
    if len(set(listed)) != len(listed):
        raise ValueError(
            f"keys occur twice: {sorted({key for key in listed if listed.count(key) > 1})}"
        )
    return KeySet(listed)


def read_ids(ids: Any) -> list[Hashable]:
    if not isinstance(ids, list | tuple):
        raise ValueError(f"ids is a {type(ids).__name__}, not a list")
    if len(set(ids)) != len(ids):
        seen: set[Hashable] = set()
        repeated = [i for i in ids if i in seen or seen.add(i)]  # type: ignore[func-returns-value]
        raise ValueError(f"{len(repeated)} ids occur more than once, among them {repeated[:5]}")
    return list(ids)


def _read_shape(shape: Any, key: str) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple):
        raise ValueError(f"trailing shape of {key!r} is {shape!r}, not a tuple of sizes")
    return tuple(read_length(size, f"trailing shape of {key!r}") for size in shape)


def check_indices(indices: Sequence[int], bs: int) -> None:
    if len(set(indices)) != len(indices):
        raise ValueError(f"sample indices {list(indices)} hold duplicates")
    if any(not 0 <= i < bs for i in indices):
        raise ValueError(f"sample indices {list(indices)} do not all lie between 0 and {bs - 1}")


def check_alike(first: SequenceSample, sample: SequenceSample, number: int) -> None:
    """Raise ValueError unless `sample` can follow `first` in one batch."""
    for trait, of_first, of_sample in (
        ("keys", first.keys, sample.keys),
        ("dtypes", first.dtypes, sample.dtypes),
        ("trailing shapes", first.trailing_shapes, sample.trailing_shapes),
        ("metadata names", first.metadata.keys(), sample.metadata.keys()),
    ):
        if of_first != of_sample:
            raise ValueError(
                f"cannot gather: batch {number} has {trait} {of_sample}, the first has {of_first}"
            )
    keys_of_first, keys_of_sample = _keys_with_data(first), _keys_with_data(sample)
    if keys_of_first != keys_of_sample:
        raise ValueError(
            f"cannot gather: batch {number} holds the data of {keys_of_sample}, the first "
            f"that of {keys_of_first}"
        )


def _keys_with_data(sample: SequenceSample) -> list[str] | None:
    return (
        None
        if sample.data is None
        else [key for key in sample.keys if sample.data[key] is not None]
    )
