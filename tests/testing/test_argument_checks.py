"""Interfaces with an argument that changes nothing, or one that changes what it should not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from rlcli.api.model import ModelInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.arguments import (
    VariedArgument,
    arguments_of,
)
from rlcli.testing.batches import DigitTokenizer
from rlcli.testing.contract import Violation
from rlcli.testing.effects import Effects
from rlcli.testing.interface.arguments import ArgumentChecks, effects_of
from rlcli.testing.interface.training_trial import usual_batches


@dataclass(kw_only=True)
class Settings(ModelInterface):
    READS: ClassVar = {"train_step": ("packed_input_ids", "prompt_mask", "rewards")}

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, tokens, mb_spec=mb_spec)

    def loss(self, output, batch):
        return -output.logprobs[mask(batch)].sum()


def mask(batch):
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def tokens(batch):
    return mask(batch).sum()


@dataclass(kw_only=True)
class EveryArgumentUsed(Settings):
    """Also one that only matters beside another, and one that needs another."""

    NEEDS: ClassVar = {"bonus": "kind=second"}
    NO_EFFECT_ON_NUMBERS: ClassVar = ("workers",)

    scale: float = 1.0
    kind: Literal["first", "second"] = "first"
    bonus: float | None = None
    most: float = 1e9
    workers: int = 2

    def loss(self, output, batch):
        factor = 2.0 if self.kind == "second" else 1.0
        rewards = (batch.data["rewards"].sum() + (self.bonus or 0.0)).clamp(max=self.most)
        return self.scale * (factor + rewards) * super().loss(output, batch)


@dataclass(kw_only=True)
class IgnoresANumber(Settings):
    discount: float = 1.0


@dataclass(kw_only=True)
class IgnoresAFlag(Settings):
    normalized: bool = False


@dataclass(kw_only=True)
class IgnoresAThresholdWithOneChoice(Settings):
    keep: Literal["best", "solved"] = "best"
    least: float | None = None

    def loss(self, output, batch):
        factor = 2.0 if self.keep == "solved" else 3.0 + (self.least or 0.0)
        return factor * super().loss(output, batch)


@dataclass(kw_only=True)
class ReadsOnlyWhetherItIsSet(Settings):
    least: float | None = None

    def loss(self, output, batch):
        return super().loss(output, batch) * (1.0 if self.least is None else 2.0)


@dataclass(kw_only=True)
class MasksBesideAFlagOnly(Settings):
    masked: bool = False
    recomputed: bool = False

    def loss(self, output, batch):
        factor = 1.0 + self.recomputed + (self.masked and self.recomputed)
        return factor * super().loss(output, batch)


@dataclass(kw_only=True)
class DetachesATerm(Settings):
    bonus: float = 0.1

    def loss(self, output, batch):
        entropy = output.entropy[mask(batch)].sum()
        return super().loss(output, batch) - self.bonus * entropy.detach()


@dataclass(kw_only=True)
class ReadsTheFirstOfAList(Settings):
    scales: tuple[float, ...] = (1.0, 2.0)

    def loss(self, output, batch):
        return self.scales[0] * super().loss(output, batch)


@dataclass(kw_only=True)
class TakesOneChoiceForAnother(Settings):
    scale: Literal["group", "batch", "none"] = "group"

    def loss(self, output, batch):
        return super().loss(output, batch) * (1.0 if self.scale == "none" else 2.0)


@dataclass(kw_only=True)
class MattersOnSeveralRanksOnly(Settings):
    per_rank: bool = False

    def train_step(self, model, data, mb_spec):
        self.factor = 1.0 / model.module.dp_size if self.per_rank else 1.0
        return super().train_step(model, data, mb_spec)

    def loss(self, output, batch):
        return self.factor * super().loss(output, batch)


@dataclass(kw_only=True)
class SaysThatItHasNone(Settings):
    NO_EFFECT_ON_NUMBERS: ClassVar = ("scale",)

    scale: float = 1.0

    def loss(self, output, batch):
        return self.scale * super().loss(output, batch)


def examine(cls):
    effects = effects_of(cls, usual_batches(cls()), DigitTokenizer())
    ArgumentChecks().test_every_argument_matters(cls, effects)


@pytest.mark.parametrize("cls", [EveryArgumentUsed, MattersOnSeveralRanksOnly])
def test_arguments_that_change_a_result_pass(cls):
    examine(cls)


@pytest.mark.parametrize(
    ("cls", "argument"),
    [
        (IgnoresANumber, "discount has no effect: results are the same with whatever it is"),
        (IgnoresAFlag, "normalized has no effect: results are the same with False and True"),
        (IgnoresAThresholdWithOneChoice, "least has no effect with keep=solved"),
        (ReadsOnlyWhetherItIsSet, "least has no effect by itself"),
        (MasksBesideAFlagOnly, "masked has no effect by itself"),
        (DetachesATerm, "bonus changes the loss, but nothing that is learned from it"),
        (ReadsTheFirstOfAList, "scales has no effect: results are the same with whatever it is"),
        (TakesOneChoiceForAnother, "scale has no effect: .* with 'group' and 'batch'"),
        (SaysThatItHasNone, "results differ between scale 1.0 and 3.0"),
    ],
)
def test_an_argument_that_breaks_the_law_is_named(cls, argument):
    with pytest.raises(Violation, match=argument):
        examine(cls)


def test_an_interface_without_arguments_is_skipped():
    with pytest.raises(pytest.skip.Exception):
        examine(Settings)


def test_other_values_are_of_the_declared_type():
    others = {argument.name: argument.others for argument in arguments_of(EveryArgumentUsed())}
    assert others["kind"] == ("second",)
    assert None in others["bonus"] or 2.0 in others["bonus"]
    assert all(type(value) is int for value in others["workers"])


def test_values_that_differed_by_themselves_are_tried_first_beside_other_choices():
    results = []

    def result(changes):
        results.append(changes)
        return [(changes.get("kind"), changes.get("limit") == 4)]

    limit = VariedArgument("limit", None, (1, 2, 3, 4))
    kind = VariedArgument("kind", "first", ("second", "third"))
    effects = Effects([limit, kind], {}, lambda changes: True, result, lambda a, b: a != b)
    assert not list(effects.ignored(()))
    assert sum({"limit", "kind"} <= changes.keys() for changes in results) == 4
