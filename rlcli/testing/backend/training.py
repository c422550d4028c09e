"""Training: a step equals that of a plain loop, however its batch is cut,
and a refused step leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.micro_batches import MicroBatch
from rlcli.api.model import TrainEngine
from rlcli.testing.backend.base import (
    OBJECTIVES,
    SETTINGS,
    BackendChecks,
    Weights,
    answer_loss,
    answer_weight,
    batch,
    different,
    distance,
    groups,
    source_of,
    train,
    weights_apart,
)
from rlcli.testing.backend.forward import CUTS, scores
from rlcli.testing.backend.plain import AdamW, PlainTraining, Stats
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.tiny_models import tiny_model

SHARED_GRADIENT = (
    "tokens that are computed once for several sequences have the gradients of all of them"
)


class BackendTrainingChecks(BackendChecks):
    """`train_batch` and `eval_batch`."""

    def test_steps_equal_a_plain_loop(self) -> None:
        """steps: loss, gradient norm, weights of a plain loop"""
        for family in self.families:
            self._require_plain_steps(self.trained_engine(family, **SETTINGS), family, "lm")

    def test_value_heads_train_like_a_plain_loop(self) -> None:
        """steps of a value head equal those of a plain loop"""
        for family in self.families[:2]:  # below the head all families train as above
            engine = self.trained_engine(family, head="value", **SETTINGS)
            self._require_plain_steps(engine, family, "value")

    def test_sequences_that_begin_alike_train_like_a_plain_loop(self) -> None:
        """steps on groups of sequences equal those of a plain loop"""
        for family in self.families:
            self._require_plain_groups(family, "lm")
        for family in self.families[:2]:
            self._require_plain_groups(family, "value")

    def test_micro_batches_change_nothing(self) -> None:
        """a step is the same for any micro-batches"""
        uncut = self.trained_engine(**SETTINGS)
        stats = train(uncut)
        weights = self.weights(uncut)
        for how, cut in CUTS.items():
            engine = self.trained_engine(**SETTINGS)
            stats_when_cut = train(engine, mb_spec=cut)
            self._require_stats(engine, stats_when_cut, stats, how, "in one piece")
            apart = weights_apart(self.weights(engine), weights, self.certain())
            if apart > self.tolerance:
                raise Violation(
                    f"weights are off by {apart:.2g} after a step {how}",
                    "sum the gradients of all micro-batches of a step",
                    _training(engine),
                )

    def test_evaluation_reports_the_loss_of_training(self) -> None:
        """eval_batch reports what train_batch reports"""
        engine = self.trained_engine(**SETTINGS)
        evaluated = engine.eval_batch(batch(), answer_loss, answer_weight, MicroBatchSpec(n_mbs=3))
        trained = train(engine)
        expected = {name: trained[name] for name in evaluated}
        cause, where = "evaluate the same model in the same way", source_of(engine, "eval_batch")
        self._require_stats(
            engine, evaluated, expected, "in eval_batch", "in train_batch", cause, where
        )

    def test_a_gradient_that_is_not_finite_changes_nothing(self) -> None:
        """a gradient that is not finite changes nothing"""
        self._require_no_trace(
            {"not finite": {"loss_fn": lambda *inputs: answer_loss(*inputs)[0] * math.nan}}
        )

    def test_a_refused_step_changes_nothing(self) -> None:
        """a step that step_if refuses changes nothing"""
        self._require_no_trace({"refused": {"step_if": lambda stats: stats["loss"] < -1e9}})

    def test_nothing_to_learn_changes_nothing(self) -> None:
        """a batch without weight, or without samples, changes nothing"""
        self._require_no_trace(
            {
                "without weight": {"loss_weight_fn": lambda _: 0},
                "without samples": {"input_": batch().select_indices([])},
            }
        )

    def test_an_abandoned_gradient_is_forgotten(self) -> None:
        """an abandoned gradient is not part of the next step"""
        engine, fresh = self.trained_engine(**SETTINGS), self.trained_engine(**SETTINGS)
        sample = batch(5)
        abandoned = MicroBatch(sample, tuple(range(sample.bs)))
        engine.forward_backward_batch([abandoned], answer_loss, torch.tensor(10.0))
        actual = train(engine)["grad_norm"]
        expected = train(fresh)["grad_norm"]
        if actual != pytest.approx(expected, rel=self.tolerance):
            raise Violation(
                f"gradient norm {actual:.6g} after an abandoned backward pass, "
                f"{expected:.6g} without it",
                "drop all gradients in optimizer_zero_grad",
                source_of(engine, "optimizer_zero_grad"),
            )

    def test_dropout_is_off_in_eval_mode(self) -> None:
        """after eval() there is no dropout, not even in recomputed passes"""
        skip_if("gpt2" not in self.families, "not tried: runs none of the tiny models with dropout")
        plain = scores(self.scoring_engine("gpt2"))
        for recompute in (False, True):
            leaky = tiny_model("gpt2", embd_pdrop=0.5, resid_pdrop=0.5).train()
            engine = self.engine(lm=leaky, gradient_checkpointing=recompute)
            engine.train()
            engine.eval()
            apart = distance(scores(engine), plain)
            if apart > self.tolerance:
                how = " (with gradient_checkpointing)" if recompute else ""
                raise Violation(
                    f"log-probs of a model with dropout are off by {apart:.2g} after eval()" + how,
                    "turn dropout off in all modules",
                    source_of(engine, "eval", "__init__"),
                )

    def test_recomputing_activations_changes_nothing(self) -> None:
        """gradient_checkpointing changes no number"""
        engine = self.trained_engine(gradient_checkpointing=True, **SETTINGS)
        skip_unless(
            getattr(self.backend(gradient_checkpointing=True), "gradient_checkpointing", False),
            "has no setting gradient_checkpointing",
        )
        actual = train(engine)
        expected = train(self.trained_engine(**SETTINGS))
        if actual != pytest.approx(expected, rel=self.tolerance):
            raise Violation(
                f"{actual} with recomputed activations, {expected} without",
                "the recomputed pass must see the same model in the same mode",
                source_of(engine, "__init__"),
            )

    # -- comparing ---------------------------------------------------------------------------------

    def _require_plain_steps(self, engine: TrainEngine, family: str, head: str) -> None:
        objective = OBJECTIVES[head]
        start = self.weights(engine)
        plain = self.plain_training(family, head)
        certain = self.certain(tiny_model(family, head=head), objective.plain)
        for step, rate in enumerate(self.rates()):
            expected = plain.step([batch(step)], objective.plain, rate)
            expected |= objective.stats(batch(step))
            cut = MicroBatchSpec(n_mbs=1 + step)
            actual = engine.train_batch(
                batch(step), objective.loss, objective.weight, mb_spec=cut, version_steps=step
            )
            occasion = f"at step {step} of {1 + step} micro-batches"
            self._require_stats(engine, actual, expected, occasion, family=family)
            weights = self.weights(engine)
            apart = weights_apart(weights, plain.weights(), certain)
            if apart > self.tolerance:
                moved = max(
                    float((weight - start[name]).abs().max())
                    for name, weight in plain.weights().items()
                )
                raise Violation(
                    f"weights of {family} are off by {apart:.2g} of the largest after step {step}; "
                    f"a plain loop moves them by at most {moved:.2g} until then",
                    self._mistake(family, head, step, weights, certain),
                    _training(engine),
                )

    def _mistake(
        self, family: str, head: str, last: int, weights: Weights, certain: Weights | None
    ) -> str:
        """The known mistake with which a plain loop has these weights after the step `last`."""

        def explains(varied: AdamW, rates: tuple[float, ...]) -> bool:
            plain = PlainTraining(tiny_model(family, head=head), varied)
            for step in range(last + 1):
                plain.step([batch(step)], OBJECTIVES[head].plain, rates[step])
            return weights_apart(weights, plain.weights(), certain) < self.tolerance

        return _known_mistake(self.optimizer_settings(**SETTINGS), self.rates(), explains)

    def _require_plain_groups(self, family: str, head: str) -> None:
        objective = OBJECTIVES[head]
        plain = self.plain_training(family, head)
        certain = self.certain(tiny_model(family, head=head), objective.plain)
        expected = plain.step([groups()], objective.plain, self.rates()[0])
        for cut in (None, MicroBatchSpec(max_tokens_per_mb=40)):
            engine = self.trained_engine(family, head=head, **SETTINGS)
            actual = engine.train_batch(
                groups(), objective.loss, objective.weight, mb_spec=cut, cut="sequence"
            )
            how = f"after a step on groups{' that are cut' if cut is not None else ''}"
            self._require_stats(engine, actual, expected, how, family=family, cause=SHARED_GRADIENT)
            apart = weights_apart(self.weights(engine), plain.weights(), certain)
            if apart > self.tolerance:
                raise Violation(
                    f"weights of {family} {how} are off by {apart:.2g} of the largest",
                    SHARED_GRADIENT,
                    _training(engine),
                )

    def _require_stats(
        self,
        engine: TrainEngine,
        actual: Stats,
        expected: Stats,
        occasion: str,
        reference: str = "in a plain loop",
        cause: str = "",
        where: str = "",
        family: str = "",
    ) -> None:
        """Raises Violation for a number that is not as expected; without a cause, with the one that
        its ratio to the expected number suggests."""
        for name, value in expected.items():
            if actual[name] != pytest.approx(value, rel=self.tolerance, abs=1e-9):
                number = f"{name} of {family}" if family else name
                cause = cause or _cause_of_ratio(actual[name] / value if value else 0.0)
                raise Violation(
                    f"{number} is {actual[name]:.6g} {occasion}, {value:.6g} {reference}",
                    cause,
                    where or _training(engine),
                )

    def _require_no_trace(self, calls: Mapping[str, Mapping[str, Any]]) -> None:
        """Checks after steps that must be refused: the same weights bit for bit,
        and later steps as if they never happened."""
        engine, untouched = self.trained_engine(**SETTINGS), self.trained_engine(**SETTINGS)
        for trained in (engine, untouched):
            train(trained, 0)
        before = self.weights(engine)
        for condition, changes in calls.items():
            self._require_refused(engine, condition, changes, before)
        for trained in (engine, untouched):
            train(trained, 2)
        apart = weights_apart(self.weights(engine), self.weights(untouched))
        if apart > 0:
            raise Violation(
                f"the step after a batch {' or '.join(calls)} is off by {apart:.2g}",
                "leave the optimizer's state as it was, and drop the gradients",
                source_of(engine, "optimizer_step", "train_batch"),
            )

    def _require_refused(
        self, engine: TrainEngine, condition: str, changes: Mapping[str, Any], before: Weights
    ) -> None:
        usual = {
            "input_": batch(1),
            "loss_fn": answer_loss,
            "loss_weight_fn": answer_weight,
            "version_steps": 1,
        }
        skipped = engine.train_batch(**{**usual, **changes})["update_skipped"]
        where = source_of(engine, "optimizer_step", "train_batch")
        if skipped != 1.0:
            raise Violation(
                f"update_skipped is {skipped:g} for a batch {condition}", "skip the update", where
            )
        weights = self.weights(engine)
        if different(weights, before):
            apart = weights_apart(weights, before)
            raise Violation(
                f"a batch {condition} changed weights by {apart:.2g}",
                "look at the gradient norm before anything is applied",
                where,
            )


def _training(engine: TrainEngine) -> str:
    return source_of(engine, "optimizer_step", "backward", "forward_backward_batch", "train_batch")


def _cause_of_ratio(ratio: float) -> str:
    for number in range(2, 10):
        if ratio == pytest.approx(number, rel=1e-3):
            return (
                f"{number} times too much: something is summed, or divided by its "
                "count, once too rarely"
            )
        if ratio == pytest.approx(1 / number, rel=1e-3):
            return (
                f"{number} times too little: only the engine divides, by the weight of "
                "all micro-batches"
            )
    return (
        "sum the gradients of all micro-batches of a step, and of no other; take "
        "the norm before clipping"
    )


def _known_mistake(
    settings: AdamW, rates: tuple[float, ...], explains: Callable[[AdamW, tuple[float, ...]], bool]
) -> str:
    """The known mistake with which a plain loop arrives at the weights found, if there is one."""
    late, constant = (rates[0], *rates), (1.0,) * len(rates)
    mistakes = {
        "no weight was changed; apply the optimizer": (replace(settings, lr=0.0), rates),
        "biases and norms decay too; give them a group with weight_decay 0": (
            replace(settings, decays_vectors=True),
            rates,
        ),
        "weight decay is missing": (replace(settings, weight_decay=0.0), rates),
        "weight decay is part of the gradient; use AdamW": (
            replace(settings, is_decoupled=False),
            rates,
        ),
        "the gradient is not clipped to max_grad_norm": (
            replace(settings, max_grad_norm=math.inf),
            rates,
        ),
        "the last step's gradient is still there": (replace(settings, keeps_gradients=True), rates),
        "the learning rate is that of the step before; set it before the update": (settings, late),
        "the schedule does not reach the optimizer": (settings, constant),
        "beta1 and beta2 are not those of the settings": (
            replace(settings, beta1=0.9, beta2=0.999),
            rates,
        ),
        "eps is not that of the settings": (replace(settings, eps=1e-8), rates),
    }
    for cause, (varied, other_rates) in mistakes.items():
        if explains(varied, other_rates):
            return cause
    return (
        "compare optimizer_step with torch's AdamW, and lr_scheduler_step with rlcli.ops.schedules"
    )
