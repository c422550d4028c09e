"""Sends calls of the graph to the workers of their roles: who computes which samples, and what is
transferred first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, updates_per_step
from rlcli.api.key_meaning import AGE, PLACE, SEQUENCES
from rlcli.messaging.messages import COMPUTE, MOVE, Fields
from rlcli.observe.responses import TEXT, Described
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.buffer import Buffer, Transfer
from rlcli.runtime.call_times import CallTimes
from rlcli.runtime.ranks import Answers, Ranks
from rlcli.runtime.report import Answered
from rlcli.runtime.timeline import Timeline
from rlcli.topology import RolePlacement, Topology
from rlcli.topology.groups import MOVES, lanes_aside, lanes_of_roles, pausing_roles

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedCall:
    """A call whose samples are assigned to ranks."""

    mfc: MFCDef
    placement: RolePlacement
    moves: Sequence[Transfer]
    """What its ranks lack."""
    requests: Mapping[int, Fields]
    """Rank → arguments of its `run_call`."""


@dataclass(eq=False)
class Arrival:
    """Transfers that are under way. Their targets count as holders from the moment they are
    planned."""

    samples: set[tuple[int, str]]
    """A rank, and a sample of which it is sent something."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class WeightCopy:
    """A copy of weights to the role that follows."""

    ranks: tuple[int, ...]
    """The ranks of source and follower, all of which take part."""
    sources: tuple[int, ...]
    followers: tuple[int, ...]
    after: str
    """The call."""


class Calls:
    """The requests for loading rows, calls, copies and clearing; `flow` decides when to send
    them."""

    def __init__(
        self, recipe: Recipe, topology: Topology, ranks: Ranks, phase: Callable[[str], None]
    ):
        self.buffer = Buffer()
        self.turns, self.are_busy = ranks.turns, ranks.are_busy
        self.timeline = Timeline(topology.groups, ranks.times, lanes_aside(recipe))
        self.streams: set[str] = set()
        """Datasets that do not know how many rows they have."""
        self._topology = topology
        self._ranks = ranks
        self._phase = phase
        self._updates = updates_per_step(train_graph(recipe))
        self.pausing = pausing_roles(recipe, topology)
        """Roles whose calls generate side by side, and pause for new weights."""
        self._lanes = lanes_of_roles(recipe, topology)
        self._arrivals: list[Arrival] = []
        """What is being transferred."""
        self._names: dict[str, str] = {}
        """Sample → its dataset's name for it."""
        self._reasons: dict[str, list[str | None]] = {}
        """Sample → why its responses have their rewards."""

    # -- a call, in the order in which these are used ----------------------------------------------

    def ranks_of(self, mfc: MFCDef) -> tuple[int, ...]:
        """The ranks whose turn a call waits for: none if its role has a lane of its own."""
        role = mfc.model_name
        return () if role in self._lanes else self._topology.placement(role).ranks

    def prepare(
        self, mfc: MFCDef, ids: Sequence[str], number: int, ages: Mapping[str, int] | None = None
    ) -> PreparedCall:
        """Assign samples, at least one, to the ranks of a call. The samples of a training step are
        a batch, in its order; `ages` are their staleness, None if none is generated ahead."""
        placement = self._topology.placement(mfc.model_name)
        shares = placement.share_out(ids, self.buffer.loads(ids, SEQUENCES))
        moves = self.buffer.transfers(shares, mfc.input_keys)
        self.buffer.count_transfers(moves)
        metadata = _metadata_in_batch(mfc, ids, ages)
        requests: dict[int, Fields] = {}
        for rank, share in shares.items():
            of_rank = requests[rank] = {"call": mfc.name, "ids": share, "step": number}
            of_rank["metadata"] = {
                name: [values[id_] for id_ in share] for name, values in metadata.items()
            }
            if not share:  # the rank takes part in the collectives
                of_rank["empty"] = self.buffer.empty(ids[0], mfc.input_keys).as_json()
        for rank, parts in self._evaluation_batches(mfc, shares).items():
            requests[rank]["parts"] = parts
        return PreparedCall(mfc, placement, moves, requests)

    def follow(self, mfc: MFCDef, title: str) -> CallTimes:
        """The times of a call on its way; `title` of its batch."""
        ranks = self._topology.placement(mfc.model_name).ranks
        return self.timeline.follow(mfc.name, mfc.interface_type.value, title, ranks)

    async def move(self, call: PreparedCall, times: CallTimes) -> None:
        """Have inputs that its ranks lack transferred to them; wait for these, and for those that
        are on their way for other calls, which are not sent twice."""
        needed = {(rank, id_) for rank, share in call.requests.items() for id_ in share["ids"]}
        earlier = [arrival for arrival in self._arrivals if not needed.isdisjoint(arrival.samples)]
        if call.moves:
            await self._transfer(call.moves, times)
        for arrival in earlier:
            await arrival.is_over.wait()

    async def _transfer(self, plan: Sequence[Transfer], times: CallTimes) -> None:
        requests: dict[int, Fields] = {}
        for transfer in plan:
            described = transfer.as_json()
            for rank in (transfer.source, transfer.target):
                requests.setdefault(rank, {"transfers": []})["transfers"].append(described)
        arrival = Arrival({(transfer.target, id_) for transfer in plan for id_ in transfer.ids})
        self._arrivals.append(arrival)
        await self._ranks.ask(MOVE, requests, lane=MOVES, call=times)
        self._arrivals.remove(arrival)
        arrival.is_over.set()

    def run(self, call: PreparedCall, times: CallTimes) -> Awaitable[Answers]:
        """Send it to its ranks."""
        self._phase(call.mfc.name)
        lane = self._lanes.get(call.mfc.model_name, COMPUTE)
        return self._ranks.ask("run_call", call.requests, lane=lane, call=times)

    def take_in(self, call: PreparedCall, answers: Answers) -> Answered:
        """Note which samples now have which outputs; returns the rest of the answers."""
        self._take_in_batches(answers)
        for answer in answers.values():
            self._reasons |= answer.get("reasons", {})
        return Answered.of(
            call.mfc, call.placement, answers, self._updates.get(call.mfc.model_name, 0)
        )

    def copy_after(self, mfc: MFCDef) -> WeightCopy | None:
        """The copy of weights after a call."""
        if mfc.weight_copy is None:
            return None
        sources = self._topology.placement(mfc.model_name).ranks
        followers = self._topology.placement(mfc.weight_copy.target).ranks
        return WeightCopy(tuple(sorted({*sources, *followers})), sources, followers, mfc.name)

    def copy(self, copy: WeightCopy, times: CallTimes) -> Awaitable[Answers]:
        """Have the ranks of both roles copy the weights."""
        args = {"after": copy.after}
        return self._ranks.ask_all("copy_weights", args, ranks=copy.ranks, call=times)

    def copied(self, copy: WeightCopy, answers: Answers) -> tuple[float, int]:
        """Seconds until the last of the followers had the weights, and the bytes that all ranks
        sent."""
        seconds = max(float(answers[rank]["seconds"]) for rank in copy.followers)
        return seconds, sum(int(answer["bytes"]) for answer in answers.values())

    # -- samples -----------------------------------------------------------------------------------

    async def load(
        self, graph: Sequence[MFCDef], dataset: str, rows: Sequence[tuple[str, int, int]]
    ) -> tuple[list[str], int]:
        """Have the workers of the graph's first call load the rows that they will work on:
        (id, row, attempt).

        A stream is read only by the first of them. Returns the ids of rows that are missing because
        it ended before them, of which nothing is kept, and its number of rows.
        """
        ids, shares = [id_ for id_, _, _ in rows], self._equal_shares(graph, rows)
        if dataset in self.streams:
            shares = {self._topology.placement(graph[0].model_name).ranks[0]: list(rows)}
        requests = {rank: {"dataset": dataset, "rows": share} for rank, share in shares.items()}
        answers = await self._load("load_rows", ids, requests)
        for answer in answers:
            self._names |= answer["names"]
        missing = [id_ for answer in answers for id_ in answer["missing"]]
        self.buffer.forget(missing)
        return missing, max(answer["length"] or 0 for answer in answers)

    async def restore(self, graph: Sequence[MFCDef], folder: str, names: Mapping[str, str]) -> None:
        """Have the workers of the graph's first call load finished samples from a checkpoint.
        `names`: sample → its dataset's name for it."""
        shares = self._equal_shares(graph, list(names))
        requests = {rank: {"folder": folder, "ids": share} for rank, share in shares.items()}
        await self._load("load_samples", list(names), requests)
        self._names |= names

    def _equal_shares(self, graph: Sequence[MFCDef], items: Sequence[T]) -> dict[int, list[T]]:
        """Rank of the graph's first call → its share, if it has one."""
        placement = self._topology.placement(graph[0].model_name)
        shares = placement.share_out(items, [1] * len(items))
        return {rank: share for rank, share in shares.items() if share}

    async def _load(
        self, op: str, ids: Sequence[str], requests: Mapping[int, Fields]
    ) -> list[Mapping[str, Any]]:
        self.buffer.expect(ids)
        answers = await self._ranks.ask(op, requests)
        self._take_in_batches(answers)
        return list(answers.values())

    def _take_in_batches(self, answers: Answers) -> None:
        """Note which ranks now hold what they answer to have."""
        for rank in sorted(answers):
            if answers[rank]["batch"] is not None:
                self.buffer.add(rank, SequenceSample.from_json(answers[rank]["batch"]))

    def names(self, ids: Sequence[str]) -> dict[str, str]:
        """Sample → its dataset's name for it."""
        return {id_: self._names[id_] for id_ in ids}

    def describe(self, ids: Sequence[str]) -> Awaitable[list[Fields]]:
        """Ask, at once, for the responses to these prompts: await the fields of a `SampleRecord`,
        except step and phase, for each."""
        by_rank = self.buffer.by_rank(ids)
        requests = {rank: {"ids": of_rank} for rank, of_rank in by_rank.items()}
        answering = self._ranks.ask("describe", requests)
        reasons = {id_: {"reason": self._reasons[id_]} for id_ in ids if id_ in self._reasons}
        return _lines_of(self.names(ids), reasons, answering)

    def forget(self, ids: Sequence[str]) -> None:
        """Release samples, here and on the workers."""
        for id_ in ids:
            self._names.pop(id_, None)
            self._reasons.pop(id_, None)
        by_rank = self.buffer.forget(ids)
        if by_rank:
            self._ranks.tell("clear", {rank: {"ids": of_rank} for rank, of_rank in by_rank.items()})

    def _evaluation_batches(
        self, mfc: MFCDef, shares: Mapping[int, list[str]]
    ) -> dict[int, list[list[int]]]:
        """Rank → the batches under the token cap that `evaluate` gets; the same number on every
        rank, because all take part in each."""
        if mfc.interface_type is not ModelInterfaceType.EVALUATE:
            return {}
        parts: dict[int, list[list[int]]] = {rank: [] for rank in shares}
        for rank, ids in shares.items():
            if ids:
                batch = self.buffer.description(ids, mfc.input_keys)
                _, parts[rank] = batch.split_to_micro_batches(mfc.mb_spec)
        most = max(map(len, parts.values()))
        for groups in parts.values():
            groups += [[] for _ in range(most - len(groups))]
        return parts


def _metadata_in_batch(
    mfc: MFCDef, ids: Sequence[str], ages: Mapping[str, int] | None
) -> dict[str, Mapping[str, int]]:
    """Extra metadata of samples for a call that takes a batch: name → sample → value."""
    if not mfc.takes_batch:
        return {}
    places = {id_: place for place, id_ in enumerate(ids)}
    return {PLACE: places} if ages is None else {PLACE: places, AGE: ages}


async def _lines_of(
    names: Mapping[str, str], described: Described, answering: Awaitable[Answers]
) -> list[Fields]:
    """A line for each response. Ranks describe different aspects of it; an aspect that is missing
    for any response of a sample is left out. `names`: sample → its dataset's name for it."""
    described = {id_: described.get(id_, {}) for id_ in names}
    for answer in (await answering).values():
        for id_, aspects in answer.items():
            described[id_] |= aspects
    return [line for id_, name in names.items() for line in _lines(name, described[id_])]


def _lines(name: str, aspects: dict[str, list[Any]]) -> Iterator[Fields]:
    """The lines of a sample. `aspects` → a value for each response."""
    texts = aspects.pop(TEXT, [])
    complete = {aspect: values for aspect, values in aspects.items() if len(values) == len(texts)}
    for number, text in enumerate(texts):
        values = {aspect: complete[aspect][number] for aspect in complete}
        yield {"id": name, "number": number, **text, **values}
