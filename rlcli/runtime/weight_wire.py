"""How the slices of a weight copy travel between two ranks: whole, or as what changed in them."""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from rlcli.api.config import ModelVersion
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError
from rlcli.ops.weight_delta import apply_delta, encode_delta
from rlcli.topology.weight_plan import Slice

Moved = tuple[Slice, torch.Tensor]
"""A slice and its elements."""
ReadsHeld = Callable[[Sequence[Slice]], list[Moved] | None]
"""Reads what the target holds of slices before they arrive, in the dtype in which it holds it;
None if it cannot be read."""

DIGEST_ROW = 2**13
"""Elements that a digest sums at a time."""
TAIL = 5
"""Integers after the elements of a message: two of a digest,
and the three of the source's version."""


@dataclass(frozen=True)
class Neighbours:
    """The two ranks that a rank exchanges messages with in one round."""

    group: dist.ProcessGroup | None
    target: int
    """It gets what leaves."""
    source: int
    """It sends what arrives."""

    def pass_on(self, leaving: torch.Tensor | None, arriving: torch.Tensor | None) -> None:
        """Send to the target and receive from the source; None: nothing in that direction."""
        self._exchange(leaving, self.target, arriving, self.source)

    def pass_back(self, leaving: torch.Tensor | None, arriving: torch.Tensor | None) -> None:
        """Send to the source and receive from the target."""
        self._exchange(leaving, self.source, arriving, self.target)

    def _exchange(
        self,
        leaving: torch.Tensor | None,
        to_rank: int,
        arriving: torch.Tensor | None,
        from_rank: int,
    ) -> None:
        operations = []
        if leaving is not None:
            operations.append(dist.P2POp(dist.isend, leaving, to_rank, self.group))
        if arriving is not None:
            operations.append(dist.P2POp(dist.irecv, arriving, from_rank, self.group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


class Wire(abc.ABC):
    """The form in which slices travel. It lives as long as its channel."""

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
        read_held: ReadsHeld,
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
        read_held: ReadsHeld,
    ) -> list[Moved]:
        message = arriving = None
        if leaving:
            assert version is not None
            message = self._count(self._message(_joined(leaving), version))
        if coming:
            arriving = torch.empty(_elements(coming) + 2 * TAIL, device=self._device)
        neighbours.pass_on(message, arriving)
        return self._opened(coming, arriving) if arriving is not None else []

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
        """Those of the bucket that is being sent."""

    def swap(
        self,
        leaving: Sequence[Moved],
        version: ModelVersion | None,
        coming: Sequence[Slice],
        neighbours: Neighbours,
        read_held: ReadsHeld,
    ) -> list[Moved]:
        held, request = self._request(coming, read_held)
        wish = torch.empty(2 + len(leaving), dtype=torch.int64, device=self._device)
        neighbours.pass_back(request, wish if leaving else None)
        letter = self._letter(wish.tolist(), leaving, version) if leaving else None
        data = self._posted(letter, coming, neighbours, is_anchor=False)
        numbers = self._opened(data, held) if coming else None
        # whether the message must be sent again, as an anchor
        is_refused = torch.tensor([int(numbers is None)], device=self._device)
        must_repeat = torch.zeros(1, dtype=torch.int64, device=self._device)
        neighbours.pass_back(
            is_refused if coming else None, must_repeat if letter is not None else None
        )
        again = letter if must_repeat.item() else None
        missing = coming if coming and numbers is None else ()
        data = self._posted(again, missing, neighbours, is_anchor=True)
        if missing and (numbers := self._opened(data, held)) is None:
            raise damaged()
        return [] if numbers is None else _split(coming, numbers.to(self._device))

    def _request(
        self, coming: Sequence[Slice], read_held: ReadsHeld
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What this rank holds of the slices, [n] float32 on the host, and the message that says
        so: its digest, and the dtype of each slice."""
        if not coming:
            return None, None
        held = read_held(coming)
        if held is None:
            numbers = torch.zeros(_elements(coming))
            dtypes = [torch.float32] * len(coming)
        else:
            numbers = torch.cat([tensor.detach().cpu().float().reshape(-1) for _, tensor in held])
            dtypes = [tensor.dtype for _, tensor in held]
        codes = [_DTYPES.index(dtype) for dtype in dtypes]
        return numbers, torch.tensor([*digest(numbers), *codes], device=self._device)

    def _letter(
        self, wish: Sequence[int], leaving: Sequence[Moved], version: ModelVersion | None
    ) -> _Letter:
        """The letter for a target that wishes for it: it says which elements it holds, by their
        digest, and in which dtypes."""
        assert version is not None
        held_digest, codes = list(wish[:2]), wish[2:]
        blocks = [moving.block for moving, _ in leaving]
        rounded = [
            torch.empty_like(tensor, dtype=_DTYPES[code], device="cpu").copy_(tensor)
            for (_, tensor), code in zip(leaving, codes, strict=True)
        ]
        self._sending.update(zip(blocks, rounded, strict=True))
        base = None
        if all(block in self._sent for block in blocks):
            base = _joined_floats(self._sent[block] for block in blocks)
        if base is not None and digest(base) != held_digest:
            base = None
        return _Letter(_joined_floats(rounded), base, version)

    def end_bucket(self) -> None:
        self._sent |= self._sending
        self._sending.clear()

    def _posted(
        self,
        letter: _Letter | None,
        coming: Sequence[Slice],
        neighbours: Neighbours,
        is_anchor: bool,
    ) -> bytes:
        """Send a letter and receive one, each after its length."""
        content = length = None
        if letter is not None:
            data = bytearray(letter.content(is_anchor))
            content = torch.frombuffer(data, dtype=torch.uint8).to(self._device)
            length = torch.tensor([len(data)], device=self._device)
            self._count(content)
        coming_length = torch.zeros(1, dtype=torch.int64, device=self._device)
        neighbours.pass_on(length, coming_length if coming else None)
        arriving = torch.empty(int(coming_length), dtype=torch.uint8, device=self._device)
        neighbours.pass_on(content, arriving if coming else None)
        return arriving.cpu().numpy().tobytes()

    def _opened(self, data: bytes, held: torch.Tensor | None) -> torch.Tensor | None:
        """The elements of a letter, [n] float32 on the host; None if it is damaged."""
        assert held is not None
        if len(data) < _HEAD.size:
            return None
        is_anchor, *expected, epoch, epoch_step, step = _HEAD.unpack_from(data)
        try:
            base = torch.zeros_like(held) if is_anchor else held
            numbers = apply_delta(base, data[_HEAD.size :])
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
class _Letter:
    """The slices that a rank sends to another."""

    numbers: torch.Tensor
    """[n] float32 on the host, rounded to the dtypes of the target."""
    base: torch.Tensor | None
    """What the target holds of them; None if it holds something else."""
    version: ModelVersion

    def content(self, is_anchor: bool) -> bytes:
        base = None if is_anchor else self.base
        head = _HEAD.pack(base is None, *digest(self.numbers), *astuple(self.version))
        return head + encode_delta(
            torch.zeros_like(self.numbers) if base is None else base, self.numbers
        )


def damaged() -> WorkerError:
    return WorkerError("weights did not arrive as they were sent", code="F18")


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


def _elements(slices: Iterable[Slice]) -> int:
    return sum(moving.block.numbers for moving in slices)


def _joined(moved: Iterable[Moved]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in moved])


def _joined_floats(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.float().reshape(-1) for tensor in tensors])


def _split(slices: Sequence[Slice], numbers: torch.Tensor) -> list[Moved]:
    parts = numbers.split([moving.block.numbers for moving in slices])
    return [
        (moving, part.view(moving.block.sizes)) for moving, part in zip(slices, parts, strict=True)
    ]
