"""Everything one of several ranks does in a backend's checks, in one process;
its results go to the parent."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.model import ForwardEngine, GenerationEngine, TrainEngine
from rlcli.api.weight_blocks import WeightBlock
from rlcli.testing.backend.base import SETTINGS, BackendChecks, export, meet, offers
from rlcli.testing.backend.differences import Weights, distance, weights_apart
from rlcli.testing.backend.forward import outputs, plain_outputs
from rlcli.testing.backend.generation import NEW_TOKENS, generate, loaded
from rlcli.testing.backend.layouts import layout_name, ranks_in
from rlcli.testing.backend.objectives import OBJECTIVES, Objective, answer_loss, train
from rlcli.testing.backend.plain import Stats, greedy_answers, plain_model
from rlcli.testing.backend.samples import LENGTHS, PROMPTS, batch, prompts
from rlcli.testing.backend.state import restore, save
from rlcli.testing.ranks import mesh_of_ranks
from rlcli.testing.tiny_models import tiny_model

EXPORT = "export"
OWN, OF_ONE = "their own checkpoint", "the checkpoint of one rank"
ON_ONE, OF_OTHERS = "the ranks' checkpoint, on one rank,", "the checkpoint of the layout before"
WHOLE = len(LENGTHS)
FEW_TOKENS = ((1, 0), (1, 1))
"""(prompt, response) of each sequence; in micro-batches of one sequence each, a rank that shares
tokens with another has one, or none."""
SHARES = (4, 5, WHOLE, 4)
"""Sequences of the first replica at each step: the others get fewer; then some of zero weight; then
none."""
SCOPES = ("global", "global", "global", "dp")
IN_TWO = MicroBatchSpec(n_mbs=2)
LATER = len(SHARES)
"""The step after the checkpoint."""

RankReport = dict[str, Any]
"""`replicas`: how many get samples of their own; `answers`: (a rank's own, transformers') by
occasion; `steps`: the stats of each step by head; what else is compared, by name: a relative
error."""
StepIf = Callable[[Mapping[str, float]], bool]


@dataclass(frozen=True)
class Life:
    """One rank of a layout; its files are in a folder named after the layout, next to those of the
    single-rank run."""

    checks: BackendChecks
    layout: Mapping[str, int]
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the backend that belong to the layout."""
    before: Life | None = None
    """An earlier one, in another layout."""
    rank: int = 0
    _expected: dict[Path, list[list[int]]] = field(default_factory=dict)
    """By folder: what transformers answers with the weights in it."""

    def on_rank(self, rank: int) -> RankReport:
        """The report of one of the layout's ranks, in a process of its own."""
        with self.checks.at_device():
            return replace(self, rank=rank).live()

    def live(self) -> RankReport:
        """Forward passes, training, steps that must be refused, an export, answers, a checkpoint
        and its resumption."""
        tiny_model(self.checks.family_of_ranks)  # kept from now on; not memory of the engine
        others = held_bytes()
        engine = self._engine()
        report: RankReport = {"replicas": self._replicas, "answers": {}, "steps": {}}
        report["log-probs"] = self._forward(engine, "lm")
        self._answer(engine)  # with weights that will soon be outdated
        if self.checks.cls.TRAINS:
            report["steps"]["lm"] = self._trained(engine, "lm")
            report |= self._refused(engine)
        report["exported"] = self._exported(engine)
        report["answers"]["after training"] = self._answers(engine, self.home / EXPORT)
        if offers(engine, "offload"):
            engine.offload()
            if offers(engine, "state"):
                report["held"] = (held_bytes() - others) / state_bytes(engine)
            report["answers"]["after offload"] = self._answers(engine, self.home / EXPORT)
        if offers(engine, "weight_blocks"):
            report["blocks"] = self._blocks(engine)
        if offers(engine, "take_parameters"):
            self._mix(engine, report)
        if self.checks.cls.TRAINS and offers(engine, "state"):
            self._continue(engine, report)
        critic = self._engine(head="value")
        report["values"] = self._forward(critic, "value")
        if self.checks.cls.TRAINS:
            report["steps"]["value"] = self._trained(critic, "value")
        return report

    def resume(self, source: Life, which: str, report: RankReport) -> None:
        """Load the checkpoint of `source`, answer, train a step: the difference from the results of
        `source`, as those of `which` checkpoint."""
        engine = self._engine(seed=1)
        self._answer(engine)
        restore(engine, source.home)
        report["answers"][f"after loading {which}"] = self._answers(engine, source.home / EXPORT)
        self._train(engine, LATER)
        is_same = (source.layout, source.settings) == (self.layout, self.settings)
        certain = None if is_same else self.checks.certain(self.checks.family_of_ranks)
        report[which] = weights_apart(self._weights(engine), load_file(source.later), certain)

    @property
    def home(self) -> Path:
        home = self.folder / layout_name(self.layout, self.settings)
        home.mkdir(exist_ok=True)
        return home

    @property
    def later(self) -> Path:
        """The weights one step after the checkpoint."""
        return self.home / "later.safetensors"

    @cached_property
    def _mesh(self) -> DeviceMesh | None:
        """That of all engines of a rank."""
        return mesh_of_ranks(**self.layout)

    @property
    def _replicas(self) -> int:
        """Data-parallel ranks."""
        return self.layout.get("dp", 1)

    # -- parts of it -------------------------------------------------------------------------------

    def _weights(self, engine: ForwardEngine) -> Weights:
        return self.checks.weights(engine, self.home / "look")

    def _moments(self, engine: ForwardEngine) -> Weights:
        """A copy of this rank's part of the optimizer state."""
        moments = engine.state().optimizer.items() if offers(engine, "state") else ()
        return {name: local_part(tensor).clone().cpu() for name, tensor in moments}

    def _engine(self, **changes: Any) -> Any:
        return self.checks.engine(
            self.checks.family_of_ranks,
            mesh=self._mesh,
            expert_ranks=self.layout.get("ep", 1),
            **{**SETTINGS, **self.settings, **changes},
        )

    def _share(self, sample: SequenceSample, cut: int) -> SequenceSample:
        """Data-parallel ranks get different samples, others the same."""
        replica = self.rank * self._replicas // ranks_in(self.layout)
        return share_of(sample, cut, replica, self._replicas)

    def _trained(self, engine: TrainEngine, head: str) -> list[Stats]:
        """The stats of each step; the weights after them are in a file."""
        stats = [self._train(engine, step, OBJECTIVES[head]) for step in range(LATER)]
        save_file(self._weights(engine), str(self.home / weights_file(head, self.rank)))
        return stats

    def _train(
        self,
        engine: TrainEngine,
        step: int,
        objective: Objective = OBJECTIVES["lm"],
        step_if: StepIf | None = None,
    ) -> Stats:
        cut, scope = (SHARES[step], SCOPES[step]) if step < LATER else (3, "global")
        cuts = MicroBatchSpec(n_mbs=1 + step)
        how = {"token_normalize_scope": scope, "mb_spec": cuts, "step_if": step_if}
        return train(engine, step, self._share(batch(step), cut), objective, **how)

    def _refused(self, engine: TrainEngine) -> RankReport:
        """Whether steps were skipped that must be refused, and how much they changed."""
        before = self._weights(engine) | self._moments(engine)
        steps = {
            "spoiled": (self._spoiled(), None),
            "refused": (OBJECTIVES["lm"], lambda stats: False),
        }
        report: RankReport = {}
        for which, (objective, step_if) in steps.items():
            skipped = self._train(engine, 0, objective, step_if)["update_skipped"]
            after = self._weights(engine) | self._moments(engine)
            report[which] = [skipped, weights_apart(after, before)]
        return report

    def _exported(self, engine: ForwardEngine) -> float:
        """The difference of weights in an export."""
        export(engine, self.home / EXPORT)
        lm = loaded(self.home / EXPORT)
        written = {name: parameter.detach() for name, parameter in lm.named_parameters()}
        return weights_apart(written, self._weights(engine))

    def _spoiled(self) -> Objective:
        """With a loss that is not finite on one rank."""
        # a rank of the last stage, which computes losses
        last = ranks_in(self.layout) - 1

        def loss(output: Any, sample: SequenceSample) -> Any:
            summed, stats = answer_loss(output, sample)
            return (summed * float("nan") if self.rank == last else summed), stats

        return replace(OBJECTIVES["lm"], loss=loss)

    def _forward(self, engine: ForwardEngine, head: str) -> float:
        """Error of log-probs or values: with uneven shares, then with everything on one rank, then
        with fewer tokens than ranks that share them."""
        plain = plain_model(self.checks.family_of_ranks, head)
        few = batch(lengths=FEW_TOKENS)
        errors = [0.0]
        for sample, cut in ((batch(), 5), (batch(), WHOLE), (few, len(FEW_TOKENS))):
            share = self._share(sample, cut)
            actual = outputs(engine, share, head, IN_TWO)
            if share.bs:
                errors.append(distance(actual, plain_outputs(plain, share, head)))
        return max(errors)

    def _answer(self, engine: ForwardEngine) -> list[list[int]]:
        """Greedy answers to this rank's prompts; none if the engine does not generate."""
        if not isinstance(engine, GenerationEngine):
            return []
        return [tokens.tolist() for tokens in generate(engine, self._prompts(), greedy=True).tokens]

    def _answers(self, engine: ForwardEngine, folder: Path) -> list[list[list[int]]]:
        """The engine's answers, and transformers' with the weights in a folder."""
        if not isinstance(engine, GenerationEngine):
            return [[], []]
        if folder not in self._expected:
            self._expected[folder] = greedy_answers(loaded(folder), self._prompts(), NEW_TOKENS)
        return [self._answer(engine), self._expected[folder]]

    def _prompts(self) -> SequenceSample:
        return self._share(prompts(), len(PROMPTS) - 1)

    def _blocks(self, engine: ForwardEngine) -> float:
        """Difference between the rank's blocks and the same numbers in whole weights."""
        weights, errors = self._weights(engine), [0.0]
        for block, values in engine.parameter_blocks():
            region = block.within(WeightBlock.whole(block.name, block.shape))
            errors.append(distance(values.detach().float(), weights[block.name][region]))
        return max(errors)

    def _mix(self, engine: ForwardEngine, report: RankReport) -> None:
        """Another engine takes its parameters: the difference of its weights from the expected
        mixture."""
        follower = self._engine(seed=1)
        self._answer(follower)
        before, theirs = self._weights(follower), self._weights(engine)
        follower.take_parameters(engine, 0.25)
        export(follower, self.home / "mixture")
        answers = self._answers(follower, self.home / "mixture")
        report["answers"]["after take_parameters"] = answers
        mixed = {name: 0.25 * theirs[name] + 0.75 * weight for name, weight in before.items()}
        report["taken"] = weights_apart(self._weights(follower), mixed)

    def _continue(self, engine: TrainEngine, report: RankReport) -> None:
        """Save, continue training, and check that others arrive at the same weights."""
        save(engine, self.home, self.rank)
        self._train(engine, LATER)
        later = self._weights(engine)
        if self.rank == 0:
            save_file(later, str(self.later))
        if not self.layout:
            return
        meet()  # all have written
        others = {OWN: self, OF_ONE: Life(self.checks, {}, self.folder), OF_OTHERS: self.before}
        for which, source in others.items():
            if source is not None:
                self.resume(source, which, report)


def share_of(sample: SequenceSample, cut: int, replica: int, replicas: int) -> SequenceSample:
    """The first `cut` samples are the first replica's; the other replicas take turns with the rest,
    the last one first."""
    if replicas == 1:
        return sample
    if replica == 0:
        return sample.select_indices(range(cut))
    return sample.select_indices(range(cut + replicas - 1 - replica, sample.bs, replicas - 1))


def held_bytes() -> int:
    """Bytes of all dense tensors of this process, shared memory counted once. Subclasses such as
    DTensor wrap other tensors and have no memory of their own."""
    gc.collect()
    alive = [value for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter)]
    dense = (tensor for tensor in alive if tensor.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in dense)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_bytes(engine: ForwardEngine) -> int:
    """Bytes of this rank's part of weights and optimizer."""
    state = engine.state()
    tensors = (*state.weights.values(), *state.optimizer.values())
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded over ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def weights_file(head: str, rank: int) -> str:
    """Name of the file with a rank's weights after the steps of a head."""
    return f"weights-{head}-{rank}.safetensors"
