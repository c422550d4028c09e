"""How the slices of a weight copy are sent from one rank to another: whole, or as their changes."""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
import torch.distributed as dist

from rlcli.api.config import ModelVersion
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError
from rlcli.ops.weight_delta import apply_delta, digest, encode_delta
from rlcli.topology.weight_plan import Slice

Moved = tuple[Slice, torch.Tensor]
"""A slice and its elements."""
ReadsBase = Callable[[Sequence[Slice]], list[Moved] | None]
"""Reads what the target holds of slices before they arrive, in the dtype in which it holds it;
None if it cannot be read."""

TAIL = 5
"""Integers after the elements of a message: two of a digest,
and the three of the source's version."""


@dataclass(frozen=True)
class Neighbours:
    """The two ranks that a rank exchanges messages with in one round."""

    group: dist.ProcessGroup | None
    device: torch.device
    target: int
    """The rank that gets what this one sends."""
    source: int
    """The rank that sends what this one gets."""

    def pass_on(self, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        """Send to the target and receive from the source; empty: nothing in that direction."""
        self._exchange(leaving, self.target, arriving, self.source)

    def pass_numbers_on(self, leaving: Sequence[int], arriving: int) -> list[int]:
        """Send integers to the target, and receive `arriving` integers from the source."""
        return self._exchange_numbers(leaving, self.target, arriving, self.source)

    def pass_numbers_back(self, leaving: Sequence[int], arriving: int) -> list[int]:
        """Send integers to the source, and receive `arriving` integers from the target."""
        return self._exchange_numbers(leaving, self.source, arriving, self.target)

    def _exchange_numbers(
        self, leaving: Sequence[int], to_rank: int, arriving: int, from_rank: int
    ) -> list[int]:
        numbers = torch.empty(arriving, dtype=torch.int64, device=self.device)
        mine = torch.tensor(leaving, dtype=torch.int64, device=self.device)
        self._exchange(mine, to_rank, numbers, from_rank)
        return numbers.tolist()

    def _exchange(
        self, leaving: torch.Tensor, to_rank: int, arriving: torch.Tensor, from_rank: int
    ) -> None:
        sides = (dist.isend, leaving, to_rank), (dist.irecv, arriving, from_rank)
        operations = [
            dist.P2POp(side, tensor, rank, self.group)
            for side, tensor, rank in sides
            if len(tensor)
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


class Wire(abc.ABC):
    """The form in which slices are sent. It lives as long as its channel."""

    def __init__(self, device: torch.device):
        self._device = device
        self.version: ModelVersion | None = None
        """The source's version, as the last message said."""
        self.bytes_sent = 0

    @abc.abstractmethod
    def swap(
        self,
        leaving: Sequence[Moved],
        version: ModelVersion | None,
        coming: Sequence[Slice],
        neighbours: Neighbours,
        read_base: ReadsBase,
    ) -> list[Moved]:
        """Send slices (float32, on the device) with the version of their source, and receive others
        in the same form. Raises WorkerError if elements differ from what was sent."""

    def end_bucket(self) -> None:  # noqa: B027 - most remember nothing
        """All slices of a bucket have been exchanged."""

    def _count(self, message: torch.Tensor) -> torch.Tensor:
        self.bytes_sent += message.numel() * message.element_size()
        return message


class WholeWire(Wire):
    """All elements, as float32."""

    def swap(
        self,
        leaving: Sequence[Moved],
        version: ModelVersion | None,
        coming: Sequence[Slice],
        neighbours: Neighbours,
        read_base: ReadsBase,
    ) -> list[Moved]:
        message = torch.empty(0, device=self._device)
        if leaving:
            assert version is not None
            message = self._count(self._message(_joined(tensor for _, tensor in leaving), version))
        length = _elements(coming) + 2 * TAIL if coming else 0
        arriving = torch.empty(length, device=self._device)
        neighbours.pass_on(message, arriving)
        return self._opened(coming, arriving) if coming else []

    def _message(self, numbers: torch.Tensor, version: ModelVersion) -> torch.Tensor:
        """[n + 10] float32: the elements of all slices, end to end, then the bits of the tail."""
        tail = torch.tensor([*digest(numbers), *astuple(version)], device=self._device)
        return torch.cat([numbers, tail.view(torch.float32)])

    def _opened(self, slices: Sequence[Slice], message: torch.Tensor) -> list[Moved]:
        numbers, tail = message[: -2 * TAIL], message[-2 * TAIL :]
        *expected, epoch, epoch_step, step = tail.clone().view(torch.int64).tolist()
        if digest(numbers) != expected:
            raise damaged()
        self.version = ModelVersion(epoch, epoch_step, step)
        return _split(slices, numbers)


class DeltaWire(Wire):
    """What changed since the last copy, in the dtype in which the target holds its weights.

    The target says first what it holds, by its digest, so a delta is only sent to a rank that can
    apply it. Otherwise, as at the first copy, after a restart, or when a copy has failed, it gets
    an anchor: a delta from zeros. It gets one, too, if the message does not arrive as it was sent.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._sent: dict[WeightBlock, torch.Tensor] = {}
        """The elements that the last copy sent, on the host, each once however many ranks got
        them."""
        self._sending: dict[WeightBlock, torch.Tensor] = {}
        """The elements of the bucket that is being sent."""

    def swap(
        self,
        leaving: Sequence[Moved],
        version: ModelVersion | None,
        coming: Sequence[Slice],
        neighbours: Neighbours,
        read_base: ReadsBase,
    ) -> list[Moved]:
        base = _Base.of(coming, read_base(coming)) if coming else None
        my_wish = base.wish if base is not None else ()
        wish = neighbours.pass_numbers_back(my_wish, 2 + len(leaving) if leaving else 0)
        letter = self._letter(wish, leaving, version) if leaving else None
        numbers = self._post(letter, base, neighbours)
        is_damaged = base is not None and numbers is None
        refusal = neighbours.pass_numbers_back([is_damaged] if coming else (), 1 if leaving else 0)
        anchor = replace(letter, base=None) if letter is not None and any(refusal) else None
        again = self._post(anchor, base if is_damaged else None, neighbours)
        if base is None:
            return []
        numbers = again if is_damaged else numbers
        if numbers is None:
            raise damaged()
        return _split(coming, numbers.to(self._device))

    def _letter(
        self, wish: Sequence[int], leaving: Sequence[Moved], version: ModelVersion | None
    ) -> _Letter:
        """The letter for a target; its `wish` says what it holds."""
        assert version is not None
        base_digest, codes = list(wish[:2]), wish[2:]
        blocks = [moving.block for moving, _ in leaving]
        rounded = [
            torch.empty_like(tensor, dtype=_DTYPES[code], device="cpu").copy_(tensor)
            for (_, tensor), code in zip(leaving, codes, strict=True)
        ]
        self._sending.update(zip(blocks, rounded, strict=True))
        base = None
        if all(block in self._sent for block in blocks):
            base = _joined(self._sent[block] for block in blocks)
        if base is not None and digest(base) != base_digest:
            base = None
        return _Letter(_joined(rounded), base, version)

    def end_bucket(self) -> None:
        self._sent |= self._sending
        self._sending.clear()

    def _post(
        self, letter: _Letter | None, base: _Base | None, neighbours: Neighbours
    ) -> torch.Tensor | None:
        """Send a letter and, for a base, receive one, each after its length. Returns the elements
        of the latter, [n] float32 on the host; None if it is damaged, or if there is none."""
        content = torch.empty(0, dtype=torch.uint8)
        if letter is not None:
            content = torch.frombuffer(bytearray(letter.content()), dtype=torch.uint8)
        lengths = [len(content)] if letter is not None else ()
        arriving = torch.empty(
            sum(neighbours.pass_numbers_on(lengths, 1 if base is not None else 0)),
            dtype=torch.uint8,
            device=self._device,
        )
        neighbours.pass_on(self._count(content.to(self._device)), arriving)
        return self._opened(arriving.cpu().numpy().tobytes(), base) if base is not None else None

    def _opened(self, data: bytes, base: _Base) -> torch.Tensor | None:
        if len(data) < _HEAD.size:
            return None
        is_anchor, *expected, epoch, epoch_step, step = _HEAD.unpack_from(data)
        start = torch.zeros_like(base.numbers) if is_anchor else base.numbers
        try:
            numbers = apply_delta(start, data[_HEAD.size :])
        except ValueError:
            return None
        if digest(numbers) != expected:
            return None
        self.version = ModelVersion(epoch, epoch_step, step)
        return numbers


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEAD = struct.Struct("<?5q")
"""Whether it is an anchor, the digest of the elements, and the three numbers of the version."""


@dataclass(frozen=True)
class _Base:
    """What a rank holds of the slices that arrive."""

    numbers: torch.Tensor
    """[n] float32 on the host."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes of the slices."""

    @classmethod
    def of(cls, coming: Sequence[Slice], tensors: Sequence[Moved] | None) -> _Base:
        """The base of the slices; where none could be read (None), zeros."""
        if tensors is None:
            return cls(torch.zeros(_elements(coming)), (torch.float32,) * len(coming))
        numbers = _joined(tensor.detach().cpu() for _, tensor in tensors)
        return cls(numbers, tuple(tensor.dtype for _, tensor in tensors))

    @property
    def wish(self) -> list[int]:
        """The digest of the numbers, and a code for each dtype."""
        return [*digest(self.numbers), *(_DTYPES.index(dtype) for dtype in self.dtypes)]


@dataclass(frozen=True)
class _Letter:
    """The slices that a rank sends to another."""

    numbers: torch.Tensor
    """[n] float32 on the host, rounded to the dtypes of the target."""
    base: torch.Tensor | None
    """What the target holds of them; None if it holds something else."""
    version: ModelVersion

    def content(self) -> bytes:
        base = torch.zeros_like(self.numbers) if self.base is None else self.base
        head = _HEAD.pack(self.base is None, *digest(self.numbers), *astuple(self.version))
        return head + encode_delta(base, self.numbers)


def damaged() -> WorkerError:
    return WorkerError("weights did not arrive as they were sent", code="F18")


def _elements(slices: Iterable[Slice]) -> int:
    return sum(moving.block.numbers for moving in slices)


def _joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors, [n] float32."""
    return torch.cat([tensor.float().reshape(-1) for tensor in tensors])


def _split(slices: Sequence[Slice], numbers: torch.Tensor) -> list[Moved]:
    parts = numbers.split([moving.block.numbers for moving in slices])
    return [
        (moving, part.view(moving.block.sizes)) for moving, part in zip(slices, parts, strict=True)
    ]
