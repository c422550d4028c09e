"""Every argument of an interface matters (`rlcli.testing.effects`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import DENSE_REWARDS, PROMPT_MASK, REWARDS
from rlcli.api.limits import needs_of
from rlcli.errors import RlcliError
from rlcli.testing.arguments import (
    Changes,
    arguments_of,
    demand_use,
    silent_arguments,
)
from rlcli.testing.batches import KEYS, PAIRS
from rlcli.testing.contract import Violation, place_of, skip_unless
from rlcli.testing.effects import Deferred, Effects, demand_effects
from rlcli.testing.interface.inference_trial import (
    CallSubject,
    CallTrial,
    inference_batches_for,
    usual_batch,
)
from rlcli.testing.interface.outputs import gap
from rlcli.testing.interface.training_trial import (
    Batches,
    Make,
    Rehearsal,
    TrainingOutcome,
    difference,
    overrides,
    state_through_json,
    usual_batches,
)

UNEVEN = [*PAIRS[:3], *([*group, *group] for group in PAIRS[3:6])]
"""Groups of different sizes, which count differently where groups count."""


class EffectSubject(CallSubject):
    """The effects of the arguments of an interface, which several checks look at."""

    @pytest.fixture(scope="class")
    @classmethod
    def computed_effects(cls) -> list[Effects]:
        """Those of all checks of a component, once they are needed."""
        return []

    @pytest.fixture
    def effects(
        self, make: Make, batches: Batches, tokenizer: Any, computed_effects: list[Effects]
    ) -> Effects:
        if not computed_effects:
            computed_effects.append(effects_of(make, batches, tokenizer))
        return computed_effects[0]


class ArgumentChecks(EffectSubject):
    def test_every_argument_matters(self, make: Make, effects: Effects) -> None:
        """every argument changes a result, unless it is declared to change no number"""
        interface = make()
        if only_rewards(interface):
            return demand_use(interface)  # only its author knows which texts show an effect
        skip_unless(
            any(argument.others for argument in arguments_of(interface)),
            "has no argument whose other values are known",
        )
        demand_effects(effects, type(interface))
        learned = effects.compared_by(partial(_differ, ignored=["loss"]))
        for argument, _ in learned.without(silent_arguments(type(interface))):
            raise Violation(
                f"{argument.name} changes the loss, but nothing that is learned from it",
                "let its gradient through: no detach, item or no_grad between the model's output "
                "and the loss",
                place_of(type(interface)),
            )


def only_rewards(interface: ModelInterface) -> bool:
    """Whether it trains nothing and gives rewards, which may take a second for a batch, to execute
    programs."""
    written = interface.writes("inference")
    rewards = written is not None and {REWARDS, DENSE_REWARDS} & set(written.all)
    return bool(rewards) and not overrides(interface, "train_step")


def effects_of(make: Make, batches: Batches, tokenizer: Any) -> Effects:
    """The results of all calls that the interface has."""
    interface = make()
    available = {*KEYS, *usual_batch(batches).keys}

    def results(changes: Changes) -> list[Deferred]:
        steps = _Training(make, batches, changes).results
        inference = [Deferred(lambda: _inference(make, batches, changes, tokenizer))]
        return [
            result
            for call, results in (("train_step", steps), ("inference", inference))
            if overrides(interface, call)
            for result in results
        ]

    return Effects(
        arguments_of(interface),
        needs_of(type(interface)),
        lambda changes: _is_accepted(make, changes, available),
        results,
        _differ,
    )


def strained(batch: SequenceSample) -> SequenceSample:
    """The batch with numbers as they rarely are, so that limits and clips take effect, and with
    responses of two turns."""
    copy = batch.select(batch.keys)
    copy.data = {
        key: _strained(key, rows) if rows.is_floating_point() else rows
        for key, rows in copy.data.items()
    }
    if PROMPT_MASK in copy.keys:
        masks = copy.data[PROMPT_MASK].split(copy.flat_seqlens(PROMPT_MASK))
        copy.data[PROMPT_MASK] = torch.cat([_in_two_turns(mask) for mask in masks])
    return copy


def _in_two_turns(prompt_mask: torch.Tensor) -> torch.Tensor:
    """The mask of a sequence, whose second token of the response was observed if a third one
    follows."""
    response = (~prompt_mask).nonzero().squeeze(1)
    copy = prompt_mask.clone()
    copy[response[1:2] if len(response) > 2 else response[:0]] = True
    return copy


def _strained(key: str, rows: torch.Tensor) -> torch.Tensor:
    """Log-probs stay below 0."""
    factors = torch.tensor([3.0, 0.1] if key.endswith("logprobs") else [30.0, -1.0])
    each = factors.repeat(len(rows) // 2 + 1)[: len(rows)].to(rows)
    return rows * each.view(-1, *[1] * (rows.dim() - 1))


class _Training:
    """Steps of an interface with some arguments changed."""

    def __init__(self, make: Make, batches: Batches, changes: Changes):
        self._make, self._batches, self._changes = make, batches, changes
        steps = (lambda: self._usual_step, self._strained_step, self._step_on_ranks)
        self.results = [Deferred(step) for step in steps]
        """In the order of their time: most arguments show their effect in the first."""

    @cached_property
    def _rehearsal(self) -> Rehearsal:
        def changed(**further: Any) -> ModelInterface:
            return self._make(**self._changes, **further)

        return Rehearsal(changed, batches_for(changed(), self._batches))

    @cached_property
    def _usual(self) -> SequenceSample:
        return self._rehearsal.fit(self._rehearsal.batches(UNEVEN))

    @cached_property
    def _usual_step(self) -> TrainingOutcome:
        return self._rehearsal.train(self._usual)

    def _strained_step(self) -> TrainingOutcome:
        """After the usual one."""
        before = self._usual_step
        return self._rehearsal.train(
            strained(self._usual), model=before.model, interface=before.interface
        )

    def _step_on_ranks(self) -> TrainingOutcome:
        """The outcome on the first of two ranks, whose shares differ."""
        shares = [range(1), range(1, self._usual.bs)]
        return self._rehearsal.train_on_ranks(self._usual, shares)[0]


def batches_for(interface: ModelInterface, batches: Batches) -> Batches:
    """Batches with the keys that an interface reads with its arguments; the author's, if only these
    are known."""
    usual = usual_batches(interface)
    try:
        usual()
    except ValueError:
        return batches
    return usual


def _inference(make: Make, batches: Batches, changes: Changes, tokenizer: Any) -> list[Any]:
    """The results of two calls, and the state after them."""
    interface = make(**changes)
    usual = inference_batches_for(interface, batches, tokenizer)(UNEVEN)
    trial = CallTrial(make, "inference", usual, tokenizer)
    outputs = [trial.run(batch, interface=interface) for batch in (usual, strained(usual))]
    return [*outputs, state_through_json(interface)]


def _is_accepted(make: Make, changes: Changes, available: Collection[str]) -> bool:
    """Whether it can be made so, and reads only keys that are known then."""
    try:
        interface = make(**changes)
    except (RlcliError, ValueError):
        return False
    written = interface.writes("inference")
    can_be_read = {*available, *(written.all if written else ())}
    declared = [interface.reads(call) for call in ("train_step", "inference")]
    return all(keys is None or can_be_read >= set(keys.needed) for keys in declared)


def _differ(first: Any, second: Any, ignored: Collection[str] = ()) -> bool:
    """Whether two results differ, other than in stats that are ignored; of several, whether any
    do."""
    if isinstance(first, Deferred):
        return _differ(first.outcome, second.outcome, ignored)
    if isinstance(first, list) and isinstance(second, list):
        return any(_differ(a, b, ignored) for a, b in zip(first, second, strict=True))
    if isinstance(first, TrainingOutcome):
        first, second = (_without(outcome, ignored) for outcome in (first, second))
        return difference(first, second, tolerance=1e-9) is not None
    if isinstance(first, SequenceSample):
        return gap(first, second) is not None or first.metadata != second.metadata
    return bool(first != second)


def _without(outcome: TrainingOutcome, ignored: Collection[str]) -> TrainingOutcome:
    """The outcome without some stats."""
    stats = {name: value for name, value in outcome.stats.items() if name not in ignored}
    return replace(outcome, stats=stats)
