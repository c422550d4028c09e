"""The data contract: `SequenceSample`, a batch of packed sequences that are never padded.

A batch holds samples (rows of a dataset); for every key, a sample holds one or more sequences: the
responses of a group, or the two sides of a pair. The rows of a key are concatenated in one tensor,
in the order of the samples; `seqlens` gives the length of each sequence. Without `data`, a batch
describes data held elsewhere.

Importing this file does not import torch, so that datasets can be inspected without it:
see `Preview`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from rlcli.api.component import make_dataset, register_dataset
from rlcli.api.config import DatasetAbstraction, MicroBatchSpec
from rlcli.api.dataset import DatasetUtility
from rlcli.api.elsewhere import attributes_of
from rlcli.api.key_meaning import COMPANIONS
from rlcli.api.lengths import Lengths, infer_lengths, read_lengths, rows_of
from rlcli.api.partition import SequenceSplitSpec, ffd_allocate, flat2d, min_abs_diff_partition
from rlcli.api.preview import Preview, Survey
from rlcli.api.sample_checks import (
    KeySet,
    check_alike,
    check_indices,
    read_fields,
    read_ids,
    read_keys,
)
from rlcli.api.sample_parts import (
    are_inverse,
    at,
    copied,
    joined,
    of_keys,
    renamed,
    rows_of_samples,
)
from rlcli.errors import DataError

if TYPE_CHECKING:
    import torch
else:  # a type checker is to report every name that is not here
    __getattr__ = attributes_of(__name__)

__all__ = [
    "DatasetAbstraction",
    "DatasetUtility",
    "MicroBatchSpec",
    "Preview",
    "SequenceSample",
    "SequenceSplitSpec",
    "Survey",
    "make_dataset",
    "register_dataset",
]


@dataclass(kw_only=True, eq=False)
class SequenceSample:
    """A batch of samples with packed sequences under named keys; see the module's docstring.

    Anything inconsistent raises ValueError at construction. Operations return new batches with
    their own lists and dicts (those whose names end in `_`, and `cuda` and `cpu`, work in place).
    Tensors are shared where possible and never cast.
    """

    ids: list[Hashable]
    """One per sample, all different; strings or ints if the batch is to be sent to other
    processes."""
    keys: KeySet = None  # type: ignore[assignment]
    """Default: the keys of `seqlens`."""
    seqlens: dict[str, Lengths]
    """Key → the lengths of each sample's sequences. Ints, lists,
    1-D tensors and arrays are accepted."""
    trailing_shapes: dict[str, tuple[int, ...] | None] = None  # type: ignore[assignment]
    """Key → shape of one row of its tensor; None if there is no tensor. Inferred from `data`."""
    dtypes: dict[str, torch.dtype | None] = None  # type: ignore[assignment]
    """Key → dtype of its tensor; None if there is no tensor. Inferred from `data`."""
    data: dict[str, torch.Tensor] | Any = None
    """Key → tensor [sum of its lengths, *trailing shape], None for a key without one. None: only a
    description. Its type says that tensors are present, because code that computes with a batch
    always gets one that has them."""
    metadata: dict[str, list[Any]] = field(default_factory=dict)
    """Name → a JSON-able value for each sample."""

    def __post_init__(self) -> None:
        read_fields(self)

    @classmethod
    def _made(cls, **fields: Any) -> SequenceSample:
        """A batch from parts of validated batches; nothing is checked again."""
        sample = object.__new__(cls)
        sample.__dict__.update(fields)
        return sample

    # -- reading -----------------------------------------------------------------------------------

    @property
    def bs(self) -> int:
        """Number of samples; may be 0."""
        return len(self.ids)

    def flat_seqlens(self, key: str) -> list[int]:
        """[N] lengths of all sequences of `key`, sample after sample."""
        return flat2d(self.seqlens[self._known(key)])

    def cu_seqlens(self, key: str) -> torch.Tensor:
        """[N + 1] int32, on the device of the data: where each sequence starts,
        and the end of the last."""
        import torch

        lengths = self.flat_seqlens(key)
        tensor = (self.data or {}).get(key)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        return starts if tensor is None else starts.to(tensor.device)

    def _known(self, key: str) -> str:
        if key not in self.keys:
            raise ValueError(f"there is no key {key!r}; there are {list(self.keys)}")
        return key

    def _longest_key(self) -> str:
        if not self.keys:
            raise ValueError("a batch without keys cannot be split by tokens")
        return max(self.keys, key=lambda key: rows_of(self.seqlens[key]))

    # -- combining ---------------------------------------------------------------------------------

    @classmethod
    def from_default(
        cls,
        *,
        ids: Sequence[Hashable],
        seqlens: Sequence[Any] | torch.Tensor | Mapping[str, Any],
        data: Mapping[str, torch.Tensor | None],
        metadata: Mapping[str, list[Any]] | None = None,
    ) -> SequenceSample:
        """A batch from its tensors and the token counts of its sequences.

        `seqlens` may be one list for all keys: the rows of a key then follow from its name
        (`values` one per token, `packed_logprobs` one less per sequence, `rewards` one per
        sequence, …) or, for other names, from the number of rows if only one rule fits. Otherwise,
        pass a mapping from each key to its lengths.
        """
        if not isinstance(seqlens, Mapping):
            lengths = read_lengths(seqlens, "seqlens")
            seqlens = {key: infer_lengths(key, tensor, lengths) for key, tensor in data.items()}
        return cls(
            ids=list(ids), seqlens=dict(seqlens), data=dict(data), metadata=dict(metadata or {})
        )

    @classmethod
    def gather(
        cls, samples: Sequence[SequenceSample], keys: Iterable[str] | None = None
    ) -> SequenceSample:
        """All samples of all batches, in order, with only `keys` (default: all,
        which must then agree).

        Empty batches are skipped. Ids must stay unique; dtypes, trailing shapes, metadata names and
        the presence of data must agree.
        """
        if not samples:
            raise ValueError("nothing to gather: the list of batches is empty")
        parts = [sample for sample in samples if sample.bs] or [samples[0]]
        if keys is not None:
            chosen = read_keys(keys)
            parts = [sample.select(chosen) for sample in parts]
        first = parts[0]
        for number, sample in enumerate(parts[1:], start=1):
            check_alike(first, sample, number)
        seqlens = {
            key: copied(flat2d(sample.seqlens[key] for sample in parts)) for key in first.keys
        }
        metadata = {
            name: flat2d(sample.metadata[name] for sample in parts) for name in first.metadata
        }
        return cls._made(
            ids=read_ids(flat2d(sample.ids for sample in parts)),
            keys=first.keys,
            seqlens=seqlens,
            trailing_shapes=dict(first.trailing_shapes),
            dtypes=dict(first.dtypes),
            data=_joined_data(parts),
            metadata=metadata,
        )

    def update_(self, source: SequenceSample) -> None:
        """Add keys and metadata of `source`, which has the same ids in the same order;
        on conflict, `source` wins."""
        if source.ids != self.ids:
            kind = (
                "the same ids in another order" if set(source.ids) == set(self.ids) else "other ids"
            )
            raise ValueError(f"cannot update a batch from one with {kind}")
        if (self.data is None) != (source.data is None):
            with_data, without = (
                ("the other", "this") if self.data is None else ("this", "the other")
            )
            raise ValueError(
                f"cannot update: {with_data} batch has data and {without} has none; use meta()"
            )
        addition = source.select(source.keys)
        self.keys = KeySet(self.keys | addition.keys)
        self.seqlens = self.seqlens | addition.seqlens
        self.trailing_shapes = self.trailing_shapes | addition.trailing_shapes
        self.dtypes = self.dtypes | addition.dtypes
        self.metadata = self.metadata | addition.metadata
        if self.data is not None:
            self.data = self.data | _data(addition)

    # -- selecting and splitting -------------------------------------------------------------------

    def select(self, keys: Iterable[str]) -> SequenceSample:
        """The same samples with these keys only, and with those that go along with them
        (`COMPANIONS`)."""
        chosen = KeySet(self._known(key) for key in read_keys(keys))
        companions = {COMPANIONS[key] for key in chosen & COMPANIONS.keys()}
        chosen = KeySet(chosen | companions & self.keys)
        metadata = {name: list(values) for name, values in self.metadata.items()}
        return self._made(
            ids=list(self.ids),
            keys=chosen,
            seqlens={key: copied(self.seqlens[key]) for key in chosen},
            trailing_shapes=of_keys(self.trailing_shapes, chosen),
            dtypes=of_keys(self.dtypes, chosen),
            data=of_keys(self.data, chosen),
            metadata=metadata,
        )

    def select_indices(self, indices: Iterable[int]) -> SequenceSample:
        """These samples in this order, each at most once.
        No indices give a batch of size 0 with the same keys."""
        return self._pick([list(indices)])[0]

    def _pick(self, groups: Sequence[Sequence[int]]) -> list[SequenceSample]:
        """One batch for each group of sample indices."""
        for group in groups:
            check_indices(group, self.bs)
        bounds = {
            key: list(itertools.accumulate(map(sum, self.seqlens[key]), initial=0))
            for key in self.data or ()
        }
        return [self._group(group, bounds) for group in groups]

    def _group(self, group: Sequence[int], bounds: Mapping[str, Sequence[int]]) -> SequenceSample:
        """The samples of these indices; `bounds`: key → where the rows of each sample begin, and
        those of the last one end."""
        data = None
        if self.data is not None:
            tensors = _data(self)
            data = {key: rows_of_samples(tensors[key], bounds[key], group) for key in self.keys}
        seqlens = {key: copied(at(rows, group)) for key, rows in self.seqlens.items()}
        return self._made(
            ids=at(self.ids, group),
            keys=self.keys,
            seqlens=seqlens,
            trailing_shapes=dict(self.trailing_shapes),
            dtypes=dict(self.dtypes),
            data=data,
            metadata={name: at(values, group) for name, values in self.metadata.items()},
        )

    def unpack(self) -> list[SequenceSample]:
        """Every sample as a batch of its own."""
        return self._pick([[i] for i in range(self.bs)])

    def get_split_spec(
        self, k: int, key: str | None = None, min_size: int = 1
    ) -> SequenceSplitSpec:
        """k contiguous parts of `min_size` samples or more, balanced by the tokens of `key`."""
        lengths = self.seqlens[self._known(key) if key is not None else self._longest_key()]
        tokens = [sum(inner) for inner in lengths]
        return SequenceSplitSpec(partitions=min_abs_diff_partition(tokens, k, min_size))

    def split_with_spec(self, spec: SequenceSplitSpec) -> list[SequenceSample]:
        """The contiguous parts that `spec` describes; it must cover the batch."""
        partitions = spec.partitions or []
        if not partitions or partitions[-1][1] != self.bs:
            raise ValueError(f"partitions {partitions} do not cover a batch of {self.bs} samples")
        return self._pick([range(start, end) for start, end in partitions])

    @overload
    def split(self, k: int, key: str | None = None, min_size: int = 1) -> list[SequenceSample]: ...
    @overload
    def split(
        self, k: MicroBatchSpec, key: str | None = None
    ) -> tuple[list[SequenceSample], list[int], list[int]]: ...
    def split(
        self, k: int | MicroBatchSpec, key: str | None = None, min_size: int = 1
    ) -> list[SequenceSample] | tuple[list[SequenceSample], list[int], list[int]]:
        """`split(k)`: k contiguous parts. `split(mb_spec)`: micro-batches,
        forward and backward indices.

        The forward indices give the sample at each place of the concatenated micro-batches; the
        backward indices are their inverse, see `reorder_output`.
        """
        if isinstance(k, MicroBatchSpec):
            parts, groups = self.split_to_micro_batches(k, key)
            forward = flat2d(groups)
            return parts, forward, sorted(range(len(forward)), key=forward.__getitem__)
        return self.split_with_spec(self.get_split_spec(k, key, min_size))

    def split_to_micro_batches(
        self,
        mb_spec: MicroBatchSpec,
        key: str | None = "packed_input_ids",
        units: Sequence[tuple[Sequence[int], int]] | None = None,
    ) -> tuple[list[SequenceSample], list[list[int]]]:
        """Micro-batches under the token cap (first-fit-decreasing),
        and the indices of the samples in each.

        Tokens are those of `key`, or of the longest key if the batch has no such key. There are at
        least `n_mbs` micro-batches, but never an empty one. `units` may say which samples stay
        together, and how many tokens each of these groups counts. Raises DataError if one sample
        alone exceeds the cap.
        """
        if self.bs == 0:
            return [], []
        counted = key if key is not None and key in self.keys else self._longest_key()
        if units is None:
            units = [((i,), sum(inner)) for i, inner in enumerate(self.seqlens[counted])]
        tokens = [count for _, count in units]
        cap = mb_spec.max_tokens_per_mb
        capacity = sum(tokens) if cap is None else cap
        for (first, *_), count in units:
            if count > capacity:
                raise self._too_long(first, f"{count} tokens of {counted}", capacity)
        allocated = ffd_allocate(tokens, capacity, min(mb_spec.n_mbs, len(units)))
        groups = sorted(sorted(flat2d(units[i][0] for i in chosen)) for chosen in allocated)
        return self._pick(groups), groups

    def _too_long(self, index: int, tokens: str, cap: int) -> DataError:
        return DataError(
            f"sample {self.ids[index]} has {tokens}, more than a micro-batch may hold: {cap}",
            hint="raise max_tokens_per_microbatch, or shorten prompts and responses",
            code="F30",
        )

    # -- order -------------------------------------------------------------------------------------

    def reorder(self, indices: Sequence[int]) -> SequenceSample:
        """The same samples in another order: place i gets sample `indices[i]`."""
        if sorted(indices) != list(range(self.bs)):
            raise ValueError(f"{list(indices)} is not a permutation of {self.bs} samples")
        return self._pick([list(indices)])[0]

    @staticmethod
    def reorder_output(
        x: torch.Tensor,
        expected_seqlens: Sequence[Sequence[int]],
        forward_indices: Sequence[int],
        backward_indices: Sequence[int],
    ) -> torch.Tensor:
        """Rows computed micro-batch by micro-batch, restored to the order of the batch that was
        split.

        `expected_seqlens` are the lengths of the result per sample, in the batch's order.
        """
        n = len(expected_seqlens)
        if not are_inverse(forward_indices, backward_indices, n):
            raise ValueError(
                f"forward and backward indices are not inverse permutations of {n} samples"
            )
        rows = [sum(expected_seqlens[i]) for i in forward_indices]
        if x.shape[0] != sum(rows):
            raise ValueError(
                f"the output has {x.shape[0]} rows, but expected_seqlens say {sum(rows)}"
            )
        if not n:
            return x
        import torch

        pieces = x.split(rows)
        return torch.cat([pieces[i] for i in backward_indices])

    # -- other forms -------------------------------------------------------------------------------

    def remap_keys_(self, remap: Mapping[str, str]) -> None:
        """Rename keys in place, all at once, so that two may swap names.
        No two may end up with the same name."""
        for key in remap:
            self._known(key)
        names = {key: remap.get(key, key) for key in self.keys}
        if len(set(names.values())) != len(names):
            raise ValueError(
                f"renaming {dict(remap)} gives two of the keys {list(self.keys)} the same name"
            )
        self.keys = read_keys(names.values())
        self.seqlens = renamed(self.seqlens, names)
        self.trailing_shapes = renamed(self.trailing_shapes, names)
        self.dtypes = renamed(self.dtypes, names)
        if self.data is not None:
            self.data = renamed(self.data, names)

    def meta(self) -> SequenceSample:
        """The batch without its data. It shares no mutable state with this one."""
        described = self.select(self.keys)
        described.data = None
        described.metadata = copy.deepcopy(self.metadata)
        return described

    def to(self, device: torch.device | str) -> SequenceSample:
        """The batch on another device."""
        moved = self.select(self.keys)
        if moved.data is not None:
            moved.data = {key: None if t is None else t.to(device) for key, t in moved.data.items()}
        return moved

    def cuda(self) -> SequenceSample:
        """Move to the current CUDA device, in place."""
        self.data = self.to("cuda").data
        return self

    def cpu(self) -> SequenceSample:
        """Move to host memory, in place."""
        self.data = self.to("cpu").data
        return self

    def as_json(self) -> dict[str, Any]:
        """The batch, data included, as lists, numbers and strings;
        `from_json` restores values and dtypes."""
        from rlcli.api.sample_json import encode

        return encode(self)

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> SequenceSample:
        """Read what `as_json` wrote; anything else raises ValueError."""
        from rlcli.api.sample_json import decode

        return decode(cls, encoded)

    as_json_compatible, from_json_compatible = as_json, from_json
    """ReaLHF's names for them."""


def _joined_data(parts: Sequence[SequenceSample]) -> dict[str, torch.Tensor | None] | None:
    """The rows of all parts, which have the same keys; None if they have no data."""
    if parts[0].data is None:
        return None
    return {key: joined([_data(sample)[key] for sample in parts]) for key in parts[0].keys}


def _data(sample: SequenceSample) -> dict[str, torch.Tensor | None]:
    tensors: Any = sample.data
    assert tensors is not None
    return tensors
