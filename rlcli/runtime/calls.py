"""Sends calls of the graph to the workers of their roles: who computes which samples, and what is transferred first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, OffloadHook, ParamReallocHook
from rlcli.api.key_meaning import NOT_ENDED, PROMPT_MASK, REWARDS, SAMPLED_LOGPROBS, SEQUENCES
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.buffer import Buffer, Transfer, share_by_rank
from rlcli.runtime.messages import COMPUTE, MOVE, MOVES
from rlcli.runtime.ranks import Answers, Ranks
from rlcli.runtime.report import Answered, StepTimes
from rlcli.runtime.weight_flow import remote_copy
from rlcli.topology import RolePlacement, Topology
from rlcli.topology.groups import pool_name, pooled_roles

DESCRIBED: Mapping[str, tuple[str, ...]] = {
    "texts": (SEQUENCES, PROMPT_MASK),
    "scores": (REWARDS,),
    "finishes": (NOT_ENDED,),
    "likelihoods": (SAMPLED_LOGPROBS, PROMPT_MASK, SEQUENCES),
}
"""What is shown of responses, and the keys that each part requires."""


def updates_per_step(graph: Sequence[MFCDef]) -> dict[str, int]:
    """Role whose weights change → by how much its version grows in a training step. A role that follows another grows
    with it."""
    trained = Counter(mfc.model_name for mfc in graph if mfc.is_train)
    for mfc in graph:
        for hook in mfc.post_hooks:
            if isinstance(hook, ParamReallocHook) and hook.target not in trained:
                trained[hook.target] = trained[mfc.model_name]
    return {role: count for role, count in trained.items() if count}


@dataclass(frozen=True)
class PreparedCall:
    """A call whose samples are assigned to ranks."""

    mfc: MFCDef
    placement: RolePlacement
    moves: Sequence[Transfer]
    """What its ranks lack."""
    requests: Mapping[int, dict[str, Any]]
    """Rank → arguments of its `run_call`."""


@dataclass(eq=False)
class Arrival:
    """Transfers that are under way. Their targets count as holders from the moment they are planned."""

    samples: Mapping[int, set[str]]
    """Rank → the samples of which it is sent something."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def concerns(self, call: PreparedCall) -> bool:
        """Whether they bring something of the samples that a call works on."""
        here = [rank for rank in self.samples if rank in call.requests]
        return any(not self.samples[rank].isdisjoint(call.requests[rank]["ids"]) for rank in here)


@dataclass(frozen=True)
class WeightCopy:
    """A copy of weights to other ranks."""

    ranks: tuple[int, ...]
    """Those of source and follower: all take part."""
    sources: tuple[int, ...]
    followers: tuple[int, ...]
    args: dict[str, Any]


class Calls:
    """The requests that loading rows, calls, copies and clearing take. `flow` decides when."""

    def __init__(self, recipe: Recipe, topology: Topology, ranks: Ranks, phase: Callable[[str], None]):
        self.buffer = Buffer()
        self.turns, self.are_busy = ranks.turns, ranks.are_busy
        self.times = StepTimes(topology.groups)
        self.streams: set[str] = set()
        """Datasets that do not know how many rows they have."""
        self._topology = topology
        self._ranks = ranks
        self._phase = phase
        self._updates = updates_per_step(train_graph(recipe))
        self._pooled = pooled_roles(recipe)
        self._arrivals: list[Arrival] = []
        """What is being transferred."""
        self._names: dict[str, str] = {}
        """Sample → its dataset's name for it."""

    # -- a call, in the order in which these are used ---------------------------------------------------------

    def ranks_of(self, mfc: MFCDef) -> tuple[int, ...]:
        """The ranks that a call keeps busy: none if it runs in a pool."""
        return () if mfc.model_name in self._pooled else self._topology.placement(mfc.model_name).ranks

    def prepare(
        self, mfc: MFCDef, ids: Sequence[str], number: int, ages: Mapping[str, int] | None = None
    ) -> PreparedCall:
        """Assign samples, at least one, to the ranks of a call. The samples of a training step are a batch, in its
        order; `ages` are their staleness, None if none is generated ahead."""
        placement = self._topology.placement(mfc.model_name)
        shares = share_by_rank(ids, [self.buffer.load(id_, SEQUENCES) for id_ in ids], placement)
        moves = self.buffer.transfers(shares, mfc.input_keys)
        self.buffer.count_transfers(moves)
        return PreparedCall(mfc, placement, moves, self._requests_of(mfc, ids, shares, number, ages))

    async def move(self, call: PreparedCall) -> None:
        """Have inputs that its ranks lack transferred to them; wait for these, and for those that are on their way for
        other calls, which are not sent twice."""
        earlier = [arrival for arrival in self._arrivals if arrival.concerns(call)]
        if call.moves:
            await self._transfer(call.moves)
        for arrival in earlier:
            await arrival.is_over.wait()

    async def _transfer(self, plan: Sequence[Transfer]) -> None:
        requests: dict[int, dict[str, Any]] = {}
        samples: dict[int, set[str]] = {}
        for transfer in plan:
            described = transfer.as_json()
            samples.setdefault(transfer.target, set()).update(transfer.ids)
            for rank in (transfer.source, transfer.target):
                requests.setdefault(rank, {"transfers": []})["transfers"].append(described)
        arrival = Arrival(samples)
        self._arrivals.append(arrival)
        answers = await self._ranks.ask(MOVE, requests, lane=MOVES)
        self.times.count_move(answer["seconds"] for answer in answers.values())
        self._arrivals.remove(arrival)
        arrival.is_over.set()

    def run(self, call: PreparedCall) -> Awaitable[Answers]:
        """Send it to its ranks."""
        role = call.mfc.model_name
        self._phase(call.mfc.name)
        return self._ranks.ask("run_call", call.requests, lane=pool_name(role) if role in self._pooled else COMPUTE)

    def take_in(self, call: PreparedCall, answers: Answers) -> Answered:
        """Note which samples now have which outputs; returns the rest of the answers."""
        role = call.mfc.model_name
        if role not in self._pooled:
            self.times.count_call({rank: answer["seconds"] + answer["copied"] for rank, answer in answers.items()})
        for rank in call.placement.ranks:
            if answers[rank]["batch"] is not None:
                self.buffer.add(rank, SequenceSample.from_json(answers[rank]["batch"]))
        rest = {rank: {**answers[rank], "batch": None} for rank in call.placement.ranks}
        copied = max(answer["copied"] for answer in rest.values())
        return Answered(call.mfc, call.placement, rest, copied, self._updates.get(role, 0))

    def copy_after(self, mfc: MFCDef) -> WeightCopy | None:
        """The copy of weights to other ranks after a call."""
        hook = remote_copy(mfc, self._topology)
        if hook is None:
            return None
        sources, followers = (self._topology.placement(role).ranks for role in (mfc.model_name, hook.target))
        rests = any(isinstance(other, OffloadHook) for other in mfc.post_hooks)
        args = {"source": mfc.model_name, "target": hook.target, "eta": hook.eta, "then_offload": rests}
        return WeightCopy(tuple(sorted({*sources, *followers})), sources, followers, args)

    def copy(self, copy: WeightCopy) -> Awaitable[Answers]:
        """Have the ranks of both roles copy the weights."""
        return self._ranks.ask("copy_weights", dict.fromkeys(copy.ranks, copy.args))

    # -- samples ---------------------------------------------------------------------------------------------

    async def load(
        self, graph: Sequence[MFCDef], dataset: str, rows: Sequence[tuple[str, int, int]]
    ) -> tuple[list[str], int]:
        """Have the workers of the graph's first call load the rows that they will work on: (id, row, attempt).

        A stream is read only by the first of them. Returns the ids of rows that are missing because it ended before
        them, of which nothing is kept, and its number of rows.
        """
        placement = self._topology.placement(graph[0].model_name)
        self.buffer.expect([id_ for id_, _, _ in rows])
        shares = {rank: share for rank, share in share_by_rank(rows, [1] * len(rows), placement).items() if share}
        if dataset in self.streams:
            shares = {placement.ranks[0]: list(rows)}
        requests = {rank: {"dataset": dataset, "rows": share} for rank, share in shares.items()}
        answers = await self._ranks.ask("load_rows", requests)
        for rank, answer in answers.items():
            if answer["batch"] is not None:
                self.buffer.add(rank, SequenceSample.from_json(answer["batch"]))
            self._names |= answer["names"]
        missing = [id_ for answer in answers.values() for id_ in answer["missing"]]
        self.buffer.forget(missing)
        return missing, max((answer["length"] or 0 for answer in answers.values()), default=0)

    async def restore(self, graph: Sequence[MFCDef], folder: str, names: Mapping[str, str]) -> None:
        """Have the workers of the graph's first call load finished samples from a checkpoint. `names`: sample → its
        dataset's name for it."""
        placement, ids = self._topology.placement(graph[0].model_name), list(names)
        self.buffer.expect(ids)
        shares = {rank: share for rank, share in share_by_rank(ids, [1] * len(ids), placement).items() if share}
        requests = {rank: {"folder": folder, "ids": share} for rank, share in shares.items()}
        for rank, answer in (await self._ranks.ask("load_samples", requests)).items():
            self.buffer.add(rank, SequenceSample.from_json(answer["batch"]))
        self._names |= names

    def names(self, ids: Sequence[str]) -> dict[str, str]:
        """Sample → its dataset's name for it."""
        return {id_: self._names[id_] for id_ in ids}

    def describe(self, ids: Sequence[str]) -> Awaitable[list[dict[str, Any]]]:
        """Ask, at once, for the responses to these prompts: await the fields of a `SampleRecord`, except step and
        phase, for each."""
        requests: dict[int, dict[str, list[str]]] = {}
        for aspect, keys in DESCRIBED.items():
            for id_ in ids:
                holders = self.buffer.holders(id_, keys)
                if holders:
                    of_rank = requests.setdefault(min(holders), {name: [] for name in DESCRIBED})
                    of_rank[aspect].append(id_)
        answering = self._ranks.ask("describe", requests) if requests else None
        return _lines_of(self.names(ids), answering)

    def forget(self, ids: Sequence[str]) -> None:
        """Release samples, here and on the workers."""
        for id_ in ids:
            self._names.pop(id_, None)
        by_rank = self.buffer.forget(ids)
        if by_rank:
            self._ranks.tell("clear", {rank: {"ids": of_rank} for rank, of_rank in by_rank.items()})

    def _requests_of(
        self,
        mfc: MFCDef,
        ids: Sequence[str],
        shares: Mapping[int, list[str]],
        number: int,
        ages: Mapping[str, int] | None,
    ) -> dict[int, dict[str, Any]]:
        """Rank → arguments of its `run_call`."""
        places = {id_: place for place, id_ in enumerate(ids)}
        args: dict[int, dict[str, Any]] = {}
        for rank, share in shares.items():
            args[rank] = {"call": mfc.name, "ids": share, "step": number}
            if mfc.takes_batch:
                args[rank]["places"] = [places[id_] for id_ in share]
            if mfc.takes_batch and ages is not None:
                args[rank]["ages"] = [ages[id_] for id_ in share]
            if not share:
                args[rank]["empty"] = self._empty(ids, mfc)
        if mfc.interface_type is ModelInterfaceType.EVALUATE:
            for rank, parts in self._evaluation_batches(mfc, shares).items():
                args[rank]["parts"] = parts
        return args

    def _empty(self, ids: Sequence[str], mfc: MFCDef) -> dict[str, Any]:
        one = ids[:1]
        like = self.buffer.description(one, mfc.input_keys).select_indices([])
        like.metadata = {name: [] for name in self.buffer.metadata_names(one)}
        return like.as_json()

    def _evaluation_batches(self, mfc: MFCDef, shares: Mapping[int, list[str]]) -> dict[int, list[list[int]]]:
        """Rank → its batches under the token cap; the same number on every rank, because all take part in each."""
        parts = {
            rank: self.buffer.description(ids, mfc.input_keys).split_to_micro_batches(mfc.mb_spec)[1] if ids else []
            for rank, ids in shares.items()
        }
        most = max(len(groups) for groups in parts.values())
        return {rank: [*groups, *[[] for _ in range(most - len(groups))]] for rank, groups in parts.items()}


async def _lines_of(names: Mapping[str, str], answering: Awaitable[Answers] | None) -> list[dict[str, Any]]:
    """The lines of samples, of which ranks describe different aspects; `names`: sample → its dataset's name for it."""
    aspects: dict[str, dict[str, Any]] = {aspect: {} for aspect in DESCRIBED}
    for answer in (await answering).values() if answering is not None else ():
        for aspect, of_samples in answer.items():
            aspects[aspect] |= of_samples
    with_text = [id_ for id_ in names if id_ in aspects["texts"]]
    return [line for id_ in with_text for line in _lines(names[id_], {a: aspects[a].get(id_) for a in DESCRIBED})]


def _lines(name: str, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per sequence of a sample; values that are not known for every sequence are left out."""
    text = known["texts"]
    count = len(text["responses"])
    rewards, finishes, logprobs = (
        values if (values := known[what]) is not None and len(values) == count else [None] * count
        for what in ("scores", "finishes", "likelihoods")
    )
    return [
        {
            "id": name, "number": number, "prompt": text["prompts"][number], "response": text["responses"][number],
            "reward": rewards[number], "answer": text["answer"], "finish": finishes[number],
            "logprob": logprobs[number],
        }
        for number in range(count)
    ]  # fmt: skip
