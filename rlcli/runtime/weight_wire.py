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

    def _count(self, message: torch.Tensor) -> None:
        self.bytes_sent += message.numel() * message.element_size()


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
            message = self._message(_joined(tensor for _, tensor in leaving), version)
        self._count(message)
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

    A round has four exchanges, in which a rank is a source, a target, or both:

    1. Targets say what they hold, so that a delta is only sent to a rank that can apply it.
    2. Sources send deltas. Where they do not know what the target holds, as at the first copy,
       after a restart, and when a copy has failed, that is an anchor: a delta from zeros.
    3. Targets say whether the delta arrived as it was sent.
    4. Sources send an anchor in place of each that did not.
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
        description = base.description if base is not None else ()
        of_target = neighbours.pass_numbers_back(description, 2 + len(leaving) if leaving else 0)
        delta = self._delta(leaving, version, of_target) if leaving else None
        numbers = self._send(delta, base, neighbours)
        numbers = self._send_damaged_again(delta, base, numbers, neighbours)
        if base is None:
            return []
        if numbers is None:
            raise damaged()
        return _split(coming, numbers.to(self._device))

    def end_bucket(self) -> None:
        self._sent |= self._sending
        self._sending.clear()

    def _delta(
        self, leaving: Sequence[Moved], version: ModelVersion | None, of_target: Sequence[int]
    ) -> _Delta:
        """What is sent to a target with the base that `of_target` describes."""
        assert version is not None
        base_digest, dtype_codes = list(of_target[:2]), of_target[2:]
        blocks = [moving.block for moving, _ in leaving]
        rounded = [
            torch.empty_like(tensor, dtype=_DTYPES[code], device="cpu").copy_(tensor)
            for (_, tensor), code in zip(leaving, dtype_codes, strict=True)
        ]
        self._sending.update(zip(blocks, rounded, strict=True))
        return _Delta(_joined(rounded), self._sent_before(blocks, base_digest), version)

    def _sent_before(
        self, blocks: Sequence[WeightBlock], base_digest: Sequence[int]
    ) -> torch.Tensor | None:
        """The elements that the last copy sent of these blocks, [n] float32 on the host; None if
        the target holds others."""
        if any(block not in self._sent for block in blocks):
            return None
        sent = _joined(self._sent[block] for block in blocks)
        return sent if digest(sent) == base_digest else None

    def _send(
        self, delta: _Delta | None, base: _Base | None, neighbours: Neighbours
    ) -> torch.Tensor | None:
        """Send a delta and, for a base, receive one, each after its length. Returns the elements
        of the latter, [n] float32 on the host; None if it is damaged, or if there is none."""
        content = torch.empty(0, dtype=torch.uint8)
        if delta is not None:
            content = torch.frombuffer(bytearray(delta.encoded()), dtype=torch.uint8)
        mine = [len(content)] if delta is not None else []
        lengths = neighbours.pass_numbers_on(mine, 1 if base is not None else 0)
        arriving = torch.empty(sum(lengths), dtype=torch.uint8, device=self._device)
        self._count(content)
        neighbours.pass_on(content.to(self._device), arriving)
        if base is None:
            return None
        return self._decoded(arriving.cpu().numpy().tobytes(), base)

    def _send_damaged_again(
        self,
        delta: _Delta | None,
        base: _Base | None,
        numbers: torch.Tensor | None,
        neighbours: Neighbours,
    ) -> torch.Tensor | None:
        """Exchange deltas that were damaged on their way once more, as anchors. Returns the
        elements, `numbers` if they have arrived before; None if they are damaged again."""
        is_damaged = base is not None and numbers is None
        report = [is_damaged] if base is not None else []
        reports = neighbours.pass_numbers_back(report, 1 if delta is not None else 0)
        anchor = replace(delta, base=None) if delta is not None and any(reports) else None
        if not is_damaged:
            self._send(anchor, None, neighbours)
            return numbers
        return self._send(anchor, base, neighbours)

    def _decoded(self, data: bytes, base: _Base) -> torch.Tensor | None:
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
    """What a target holds of the slices that come."""

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
    def description(self) -> list[int]:
        """What is sent to the source: the digest of the numbers, and a code for each dtype."""
        return [*digest(self.numbers), *(_DTYPES.index(dtype) for dtype in self.dtypes)]


@dataclass(frozen=True)
class _Delta:
    """How the slices that a source sends differ from what the target holds."""

    numbers: torch.Tensor
    """[n] float32 on the host, rounded to the dtypes of the target."""
    base: torch.Tensor | None
    """[n] float32 on the host: what the target holds of them; None: an anchor, from zeros."""
    version: ModelVersion

    def encoded(self) -> bytes:
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
