"""Sends calls of the graph to the workers of their roles: who computes which samples, and what is transferred first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, OffloadHook, ParamReallocHook
from rlcli.api.key_meaning import NOT_ENDED, PROMPT_MASK, REWARDS, SAMPLED_LOGPROBS, SEQUENCES
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.answered import Answered
from rlcli.runtime.arrivals import Arrival, Arrivals
from rlcli.runtime.buffer import Buffer, Transfer
from rlcli.runtime.call_order import CallOrder, Pending
from rlcli.runtime.messages import COMPUTE, MOVE, MOVES
from rlcli.runtime.partition import share_by_rank
from rlcli.runtime.requests import Answers, Requests
from rlcli.runtime.scheduler import Task
from rlcli.runtime.step_times import StepTimes
from rlcli.runtime.weight_flow import remote_copy
from rlcli.topology import Topology
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
    found = Counter(mfc.model_name for mfc in graph if mfc.is_train)
    for mfc in graph:
        for hook in mfc.post_hooks:
            if isinstance(hook, ParamReallocHook) and hook.target not in found:
                found[hook.target] = found[mfc.model_name]
    return {role: count for role, count in found.items() if count}


class Calls:
    """Sends out loading, calling and clearing requests. Nothing here waits: answers arrive in `Requests.wait`."""

    def __init__(self, recipe: Recipe, topology: Topology, requests: Requests, phase: Callable[[str], None]):
        self.buffer = Buffer()
        self.times = StepTimes(topology.groups)
        self.streams: set[str] = set()
        """Datasets that do not know how many rows they have."""
        self._topology = topology
        self._requests = requests
        self._phase = phase
        self._mfcs = {mfc.name: mfc for mfc in (*train_graph(recipe), *eval_graph(recipe))}
        self._updates = updates_per_step(train_graph(recipe))
        self._pooled = pooled_roles(recipe)
        self._order = CallOrder()
        self._arrivals = Arrivals()
        self._working: Counter[int] = Counter()
        """Rank → the number of calls sent to it and not yet answered."""
        self._names: dict[str, str] = {}
        """Sample → its dataset's name for it."""

    def load(
        self,
        graph: Sequence[MFCDef],
        dataset: str,
        rows: Sequence[tuple[str, int, int]],
        then: Callable[[], None],
        ended: Callable[[int, list[str]], None] | None = None,
    ) -> None:
        """Have the workers of the graph's first call load the rows that they will work on: (id, row, attempt).

        A stream is read only by the first of them. `ended` is called instead of `then` if it ended before some of the
        rows, with its number of rows and the ids of the missing samples, of which nothing is kept.
        """
        placement = self._topology.placement(graph[0].model_name)
        self.buffer.expect([id_ for id_, _, _ in rows])
        shares = {rank: share for rank, share in share_by_rank(rows, [1] * len(rows), placement).items() if share}
        if dataset in self.streams:
            shares = {placement.ranks[0]: list(rows)}

        def loaded(answers: Answers) -> None:
            missing: list[str] = []
            for rank, answer in answers.items():
                if answer["batch"] is not None:
                    self.buffer.add(rank, SequenceSample.from_json(answer["batch"]))
                self._names |= answer["names"]
                missing += answer["missing"]
            if not missing or ended is None:
                then()
                return
            self.buffer.forget(missing)
            ended(answers[placement.ranks[0]]["length"], missing)

        self._requests.post("load_rows", {r: {"dataset": dataset, "rows": s} for r, s in shares.items()}, loaded)

    def restore(self, graph: Sequence[MFCDef], folder: str, names: Mapping[str, str]) -> None:
        """Have the workers of the graph's first call load finished samples from a checkpoint, and wait for them.
        `names`: sample → its dataset's name for it."""
        placement, ids = self._topology.placement(graph[0].model_name), list(names)
        self.buffer.expect(ids)
        shares = {rank: share for rank, share in share_by_rank(ids, [1] * len(ids), placement).items() if share}
        answers = self._requests.ask("load_samples", {r: {"folder": folder, "ids": s} for r, s in shares.items()})
        for rank, answer in answers.items():
            self.buffer.add(rank, SequenceSample.from_json(answer["batch"]))
        self._names |= names

    def names(self, ids: Sequence[str]) -> dict[str, str]:
        """Sample → its dataset's name for it."""
        return {id_: self._names[id_] for id_ in ids}

    def dispatch(
        self,
        task: Task,
        ids: Sequence[str],
        then: Callable[[Answered], None],
        ages: Mapping[str, int] | None = None,
    ) -> None:
        """Send a call on some samples, at least one, to the workers of its role, and have inputs that they lack
        transferred to them. The samples of a training step are a batch, in its order; `ages` are their staleness, None
        if none is generated ahead. A call that runs in a pool leaves its ranks free for other calls."""
        mfc = self._mfcs[task.call]
        placement = self._topology.placement(mfc.model_name)
        lane = pool_name(mfc.model_name) if mfc.model_name in self._pooled else COMPUTE
        busy = placement.ranks if lane == COMPUTE else ()
        shares = share_by_rank(ids, [self.buffer.load(id_, SEQUENCES) for id_ in ids], placement)
        moves = self.buffer.transfers(shares, mfc.input_keys)
        self.buffer.count_transfers(moves)
        requests = self._requests_of(task, mfc, ids, shares, ages)
        hook, copy = remote_copy(mfc, self._topology), Pending(mfc.model_name, placement.ranks)

        def done(answers: Answers) -> None:
            self._working.subtract(busy)
            self.times.count_call({rank: answers[rank]["seconds"] + answers[rank]["copied"] for rank in busy})
            reports = self._take_outputs({rank: answers[rank] for rank in placement.ranks})
            copied = max(answer["copied"] for answer in reports.values())
            answered = Answered(task, mfc, placement, reports, copied, self._updates.get(mfc.model_name, 0))
            if hook is None:
                then(answered)
            else:
                self._copy_to_others(hook, copy, answered, then)

        def run() -> None:
            self._phase(task.call)
            self._working.update(busy)
            self._requests.post("run_call", requests, done, lane=lane)

        self._start_in_order(Pending(mfc.model_name, busy, run), shares, moves)
        if hook is not None:  # its ranks copy the weights before they start later work
            self._order.add(copy)

    def _requests_of(
        self,
        task: Task,
        mfc: MFCDef,
        ids: Sequence[str],
        shares: Mapping[int, list[str]],
        ages: Mapping[str, int] | None,
    ) -> dict[int, dict[str, Any]]:
        """Rank → arguments of its `run_call`."""
        places = {id_: place for place, id_ in enumerate(ids)}
        args: dict[int, dict[str, Any]] = {}
        for rank, share in shares.items():
            args[rank] = {"call": task.call, "ids": share, "step": task.step}
            if mfc.is_train:
                args[rank]["places"] = [places[id_] for id_ in share]
            if mfc.is_train and ages is not None:
                args[rank]["ages"] = [ages[id_] for id_ in share]
            if not share:
                args[rank]["empty"] = self._empty(ids, mfc)
        if mfc.interface_type is ModelInterfaceType.EVALUATE:
            for rank, parts in self._evaluation_batches(mfc, shares).items():
                args[rank]["parts"] = parts
        return args

    def _take_outputs(self, answers: Answers) -> Answers:
        """Note which samples now have which outputs; returns the rest of the answers."""
        for rank, answer in answers.items():
            if answer["batch"] is not None:
                self.buffer.add(rank, SequenceSample.from_json(answer["batch"]))
        return {rank: {name: answer[name] for name in answer if name != "batch"} for rank, answer in answers.items()}

    def _copy_to_others(
        self, hook: ParamReallocHook, copy: Pending, answered: Answered, then: Callable[[Answered], None]
    ) -> None:
        """A call is done once a role on other ranks that follows its role has the new weights."""
        rests = any(isinstance(other, OffloadHook) for other in answered.mfc.post_hooks)
        args = {"source": answered.mfc.model_name, "target": hook.target, "eta": hook.eta, "then_offload": rests}
        followers = self._topology.placement(hook.target).ranks
        ranks = tuple(sorted({*answered.placement.ranks, *followers}))

        def copied(answers: Answers) -> None:
            then(replace(answered, copy_seconds=max(answers[rank]["seconds"] for rank in followers)))

        copy.ranks = ranks
        copy.run = lambda: self._requests.post("copy_weights", dict.fromkeys(ranks, args), copied)
        if any(self._working[rank] for rank in followers):  # its ranks would only wait for the followers
            self._order.give_way(copy)
        self._order.inputs_are_there(copy)

    def _start_in_order(self, call: Pending, shares: Mapping[int, Sequence[str]], plan: Sequence[Transfer]) -> None:
        """Start a call once its inputs are at its ranks, and after earlier calls of the same ranks. Inputs may come by
        its own plan, or by that of another call, even one that does not keep these ranks busy."""
        self._order.add(call)
        awaited = self._arrivals.of(shares)
        if plan:
            awaited.append(self._move(plan))
        if not awaited:
            self._order.inputs_are_there(call)
            return

        def arrived(arrival: Arrival) -> None:
            awaited.remove(arrival)
            if not awaited:
                self._order.inputs_are_there(call)

        for arrival in awaited:
            arrival.then.append(arrived)

    def _move(self, plan: Sequence[Transfer]) -> Arrival:
        """Have tensors transferred."""
        moves: dict[int, dict[str, Any]] = {}
        for transfer in plan:
            described = transfer.as_json()
            for rank in (transfer.source, transfer.target):
                moves.setdefault(rank, {"transfers": []})["transfers"].append(described)
        arrival = self._arrivals.expect(plan)

        def moved(answers: Answers) -> None:
            self.times.count_move(answer["seconds"] for answer in answers.values())
            self._arrivals.end(arrival)

        self._requests.post(MOVE, moves, moved, lane=MOVES)
        return arrival

    def describe(self, ids: Sequence[str], then: Callable[[list[dict[str, Any]]], object]) -> None:
        """`then(lines)`: the fields of a `SampleRecord`, except step and phase, for every response to these prompts."""
        args: dict[int, dict[str, list[str]]] = {}
        for what, keys in DESCRIBED.items():
            for id_ in ids:
                holders = self.buffer.holders(id_, keys)
                if holders:
                    args.setdefault(min(holders), {name: [] for name in DESCRIBED})[what].append(id_)
        names = self.names(ids)

        def described(answers: Answers) -> None:
            known: dict[str, dict[str, Any]] = {what: {} for what in DESCRIBED}
            for answer in answers.values():
                for what, of_samples in answer.items():
                    known[what] |= of_samples
            with_text = [id_ for id_ in ids if id_ in known["texts"]]
            then([line for id_ in with_text for line in _lines(names[id_], {w: known[w].get(id_) for w in DESCRIBED})])

        if args:
            self._requests.post("describe", args, described)
        else:
            then([])

    def forget(self, ids: Sequence[str]) -> None:
        """Release samples, here and on the workers."""
        for id_ in ids:
            self._names.pop(id_, None)
        held = self.buffer.forget(ids)
        if held:
            self._requests.post("clear", {rank: {"ids": mine} for rank, mine in held.items()}, lambda _: None)

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
