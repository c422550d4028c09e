"""Checks of one training step: what it reads, what its loss is, what receives a gradient."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import DeclaredKeys
from rlcli.testing.batches import KEYS, make_batch
from rlcli.testing.contract import Violation, place_of, skip_unless
from rlcli.testing.interface.actions import (
    LOSS_MASK,
    LOSS_WEIGHTS,
    trained_actions,
    with_narrower_loss_mask,
    with_noise_elsewhere,
)
from rlcli.testing.interface.loss import (
    WEIGHT,
    TokenGradients,
    cause_of_no_sum,
    in_parts,
    token_gradients,
)
from rlcli.testing.interface.outputs import check_untouched, frozen_copy
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Rehearsal,
    TrainingOutcome,
    difference,
    is_close,
    overrides,
    place_of_call,
    place_of_number,
    state_through_json,
)


class TrainingChecks(InterfaceSubject):
    def test_reads_what_it_declares(self, rehearsal: Rehearsal) -> None:
        """training reads the keys that it declares, and no others"""
        declared, batch = _declared_keys(rehearsal), rehearsal.batch
        for key in (*declared.needed, *(key for key in declared.if_given if key in batch.keys)):
            if key != "packed_input_ids" and _same_without(rehearsal, key):
                raise Violation(
                    f"train_step declares {key}, but does the same without it",
                    "take it out of READS, or read it",
                    rehearsal.where,
                )
        for key in _further_keys({*declared.all, *batch.keys}):
            rehearsal.demand_same(
                rehearsal.result,
                rehearsal.train(_with_keys(batch, [key])),
                ("without", f"with the key {key}, which READS does not name"),
                f'if that is intended, declare it: "{key} if given"',
            )

    def test_loss_weights_need_no_other_key(self, rehearsal: Rehearsal) -> None:
        """loss_weights change a step where no other key is given that may be missing"""
        declared = rehearsal.make().reads("train_step")
        if declared is None or LOSS_WEIGHTS not in declared.if_given:
            pytest.skip("reads no loss_weights that may be missing")
        without, weighted = (
            rehearsal.train(rehearsal.batch.select([*declared.needed, *weights]))
            for weights in ((), (LOSS_WEIGHTS,))
        )
        if difference(without, weighted, tolerance=0.0) is None:
            raise Violation(
                f"a step is the same with {LOSS_WEIGHTS} and without",
                "multiply the loss of each action by its weight",
                rehearsal.where,
            )

    def test_works_with_what_it_declares(self, rehearsal: Rehearsal) -> None:
        """the keys that it declares are enough, without those that it reads if given"""
        declared = _declared_keys(rehearsal)
        few = rehearsal.batch.select(declared.needed)
        try:
            outcome = rehearsal.train(few)
        except Exception as error:
            everything = _with_keys(few, _further_keys(few.keys))
            rehearsal.train(everything)  # also raises if a missing key is not the reason
            raise Violation(
                f"train_step fails on a batch with {', '.join(declared.needed)}: "
                f"{type(error).__name__}: {error}",
                "it reads a key that READS does not name",
                rehearsal.where,
            ) from error
        _check_finite(rehearsal, outcome)

    def test_the_loss_is_finite(self, rehearsal: Rehearsal) -> None:
        """stats are finite numbers, the loss among them"""
        result = rehearsal.result
        if not result.engine.calls:
            raise Violation(
                "train_step never calls model.module.train_batch",
                "give it the loss function and its weight; it runs the model and the optimizer",
                rehearsal.where,
            )
        _check_finite(rehearsal, result)
        if "loss" not in result.stats:
            raise Violation(
                f"the stats are {', '.join(result.stats) or 'empty'}: there is no loss",
                "return the stats of train_batch, and add your own",
                rehearsal.where,
            )

    def test_the_loss_is_that_of_all_optimizer_steps(self, rehearsal: Rehearsal) -> None:
        """the loss of several optimizer steps is between theirs"""
        result = rehearsal.result
        losses = [call.stats["loss"] for call in result.engine.calls if call.batch.bs]
        loss = result.stats.get("loss")
        if len(set(losses)) < 3 or loss is None:
            pytest.skip("takes at most two optimizer steps")
        if not min(losses) < loss < max(losses) or loss in losses:
            raise Violation(
                f"the loss is {loss:.6g}, those of {len(losses)} optimizer steps are "
                + ", ".join(f"{of_step:.6g}" for of_step in losses),
                "report the mean over all of them",
                rehearsal.where,
            )

    def test_the_loss_is_a_sum(self, rehearsal: Rehearsal) -> None:
        """the loss, its weight, which is above 0, and its stats, or each of pairs (sum, count),
        are sums"""
        call, batch, samples = in_parts(rehearsal.result)
        for name, together in batch.numbers.items():
            columns = zip(*(sample.numbers[name] for sample in samples), strict=True)
            one_by_one = list(map(sum, columns))
            is_weight = name == WEIGHT
            if not all(map(is_close, together, one_by_one)) or (is_weight and batch.weight <= 0):
                raise Violation(
                    f"the {name} of {len(samples)} samples is {together[0]:.6g} together and "
                    f"{one_by_one[0]:.6g} one by one",
                    cause_of_no_sum(name, batch, samples),
                    place_of(call.loss_weight_fn if is_weight else call.loss_fn),
                )

    def test_gradient_reaches_every_parameter(self, rehearsal: Rehearsal) -> None:
        """gradient reaches every parameter that the loss depends on"""
        result = rehearsal.result
        engine, call = result.engine, result.engine.calls[0]
        if not engine.heads:
            raise Violation(
                "the loss asks nothing of the model's output",
                "use output.logprobs, output.values or output.logits",
                place_of(call.loss_fn),
            )
        if engine.steps == 0:
            raise Violation(
                "no optimizer step was taken (update_skipped is "
                f"{result.stats.get('update_skipped')})",
                "step_if refused the step, or the loss weight is 0, on a batch sampled from the "
                "model itself",
                rehearsal.where,
            )
        heads = {"lm": "head", "value": "value_head"}
        for name in ["embedding", *(heads[head] for head in sorted(engine.heads))]:
            if not float(engine.gradient[name].abs().max()) > 0:
                raise Violation(
                    f"no gradient reaches the {name.replace('_', ' ')}, on which the loss depends",
                    "the loss is detached (detach, item, no_grad, numpy) between the output and "
                    "its return",
                    place_of(call.loss_fn),
                )

    def test_frozen_parameters_stay(self, rehearsal: Rehearsal) -> None:
        """parameters that are frozen get no gradient and stay"""
        for frozen in ("head", "value_head", "embedding"):
            model = rehearsal.model()
            parameter = getattr(model.module.model, frozen)
            parameter.requires_grad_(False)
            before = parameter.detach().clone()
            rehearsal.train(rehearsal.batch, model=model)
            if parameter.requires_grad or not torch.equal(parameter, before):
                change = float((parameter.detach() - before).abs().max())
                raise Violation(
                    f"the frozen {frozen.replace('_', ' ')} changed by up to {change:.3g}",
                    "leave requires_grad and the parameters alone: which are trained is the "
                    "recipe's decision",
                    rehearsal.where,
                )

    def test_masked_tokens_get_no_gradient(self, rehearsal: Rehearsal) -> None:
        """masked and prompt tokens get no gradient"""
        result, entries = _gradients(rehearsal)
        sizes = torch.cat([entry.size[~entry.trained] for entry in entries])
        if wrong := int((sizes > 0).sum()):
            raise Violation(
                f"{wrong} of {len(sizes)} masked tokens get a gradient, up to "
                f"{float(sizes.max()):.3g}",
                "keep the rows of loss_mask, or of action_mask(prompt_mask, lengths): action t "
                "chose token t + 1",
                place_of(result.engine.calls[0].loss_fn),
            )

    def test_the_end_of_a_sequence_predicts_nothing(self, rehearsal: Rehearsal) -> None:
        """the logits after the last token of a sequence get no gradient"""
        result = rehearsal.result
        received = [(each.sequences, each.gradient("logits")) for each in result.engine.passes]
        passes = [(tokens, sizes) for tokens, sizes in received if sizes is not None]
        skip_unless(passes, "takes no logits")
        for sequences, sizes in passes:
            ends = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0) - 1
            if len(sizes) == int(ends[-1]) + 1 and sizes[ends].any():
                raise Violation(
                    f"the logits at the end of {int(sizes[ends].count_nonzero())} sequences get a "
                    f"gradient, up to {float(sizes[ends].max()):.3g}",
                    "logits t predict token t + 1: leave out the last row of each sequence",
                    place_of(result.engine.calls[0].loss_fn),
                )

    def test_every_response_token_is_trained(self, rehearsal: Rehearsal) -> None:
        """responses are trained on from first token to last,
        and every token that loss_mask keeps"""
        result, entries = _gradients(rehearsal)
        where = place_of(result.engine.calls[0].loss_fn)
        responses = [entry.size[entry.trained] for entry in entries]
        responses = [sizes for sizes in responses if len(sizes) > 1 and sizes.any()]
        for end, row in (("first", 0), ("last", -1)):
            if responses and all(float(sizes[row]) == 0 for sizes in responses):
                raise Violation(
                    f"the {end} token of each of {len(responses)} responses gets no gradient, "
                    "though others do",
                    "the mask is shifted by one: action t, the row t of log-probs, chose token "
                    "t + 1",
                    where,
                )
        sizes = torch.cat([entry.size[entry.trained] for entry in entries])
        if LOSS_MASK in rehearsal.batch.keys and not sizes.all():
            raise Violation(
                f"{int((sizes == 0).sum())} of {len(sizes)} tokens that loss_mask keeps get no "
                "gradient",
                "train on all that it keeps; which tokens count was decided by the call that "
                "wrote it",
                where,
            )

    def test_numbers_on_prompts_are_not_read(self, rehearsal: Rehearsal) -> None:
        """numbers at prompt positions do not matter"""
        batch = rehearsal.batch
        trained = trained_actions(batch)
        if trained is None:
            pytest.skip("reads no prompt_mask")
        noisy = dict(with_noise_elsewhere(batch, trained))
        together = batch.select(batch.keys)
        together.data |= {key: changed.data[key] for key, changed in noisy.items()}
        if not noisy or difference(rehearsal.result, rehearsal.train(together)) is None:
            return
        for key, changed in noisy.items():
            rehearsal.demand_same(
                rehearsal.result,
                rehearsal.train(changed),
                ("with one", f"with another {key} at prompt positions"),
                "use the mask before any mean, sum or normalisation",
            )

    def test_its_input_stays_as_it_was(self, rehearsal: Rehearsal) -> None:
        """its input stays as it was, with and without keys that it reads if given"""
        declared = rehearsal.make().reads("train_step")
        _stays_as_it_was(rehearsal, rehearsal.batch)
        if declared is not None and declared.if_given:
            _stays_as_it_was(rehearsal, rehearsal.batch.select(declared.needed))

    def test_is_deterministic(self, rehearsal: Rehearsal) -> None:
        """the same seed gives the same step, whatever was drawn before"""

        def trained_after(seed: int) -> TrainingOutcome:
            random.seed(seed)
            torch.manual_seed(seed)
            return rehearsal.train(rehearsal.batch, spec=MicroBatchSpec(n_mbs=2))

        first, second = map(trained_after, (1, 2))
        rehearsal.demand_same(
            first,
            second,
            ("once", "the second time"),
            "it draws from a global random state; seed a generator with stable_seed(model.seed, …)",
            tolerance=0.0,
        )

    def test_learning_rate_is_that_of_the_step(self, rehearsal: Rehearsal) -> None:
        """the step determines the learning rate, and is counted once"""
        model = rehearsal.model()
        model.version.global_step = 3
        rehearsal.train(rehearsal.batch, model=model)
        steps = sorted(set(model.module.scheduled))
        if steps != [3]:
            raise Violation(
                f"train_step number 3 asked for the learning rate of {steps}",
                "leave version_steps out, or pass model.version.global_step before anything "
                "increments it",
                rehearsal.where,
            )
        if model.version.global_step != 4:
            raise Violation(
                f"after train_step number 3 the version is {model.version.global_step}",
                "leave model.version alone: rlcli counts training steps",
                rehearsal.where,
            )

    def test_goes_on_from_its_state(self, rehearsal: Rehearsal) -> None:
        """state_dict is JSON; resuming from it equals never stopping"""
        first, second = rehearsal.batch, rehearsal.fit(rehearsal.batches(seed=1))
        unbroken = rehearsal.train(first, second)
        half = rehearsal.train(first)
        resumed = rehearsal.make()
        resumed.load_state_dict(state_through_json(half.interface))
        after = rehearsal.train(second, model=half.model, interface=resumed)
        keeps_state = overrides(resumed, "state_dict")
        rehearsal.demand_same(
            unbroken,
            after,
            ("without a break", "after a restart"),
            "state_dict leaves out what train_step changes in the interface, or "
            "load_state_dict ignores it",
            tolerance=0.0,
            where=place_of_call(resumed, "state_dict") if keeps_state else rehearsal.where,
        )


def _declared_keys(rehearsal: Rehearsal) -> DeclaredKeys:
    """Those that training reads; skips the check where they are not declared."""
    declared = rehearsal.make().reads("train_step")
    if declared is None:
        pytest.skip("not tried: train_step is not in READS")
    return declared


def _further_keys(present: Collection[str]) -> list[str]:
    """All other keys that a batch for training can have."""
    return [key for key in KEYS if key not in (*present, "packed_prompts")]


def _with_keys(batch: SequenceSample, keys: list[str]) -> SequenceSample:
    """A copy of the batch that also has these keys."""
    richer = make_batch(keys, lengths_of(batch)).select(keys)
    richer.update_(batch)
    return richer


def _check_finite(rehearsal: Rehearsal, outcome: TrainingOutcome) -> None:
    for name, value in outcome.stats.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise Violation(
                f"{name} is {value!r}",
                "return plain finite floats",
                place_of_number(rehearsal, name, outcome),
            )


def _stays_as_it_was(rehearsal: Rehearsal, batch: SequenceSample) -> None:
    before = frozen_copy(batch)
    rehearsal.train(batch, batch)  # at the second call its state has changed
    check_untouched(batch, before, rehearsal.where)


def _gradients(rehearsal: Rehearsal) -> tuple[TrainingOutcome, list[TokenGradients]]:
    """A training step, and for each sequence its gradients."""
    batch = with_narrower_loss_mask(rehearsal.batch)
    result = rehearsal.train(batch)
    entries = token_gradients(batch, result)
    skip_unless(entries, "reads no prompt_mask")
    return result, entries


def _same_without(rehearsal: Rehearsal, key: str) -> bool:
    batch = rehearsal.batch
    try:
        poorer = rehearsal.train(batch.select(batch.keys - {key}))
    except Exception:
        return False
    return difference(rehearsal.result, poorer, tolerance=0.0) is None


def lengths_of(batch: SequenceSample) -> list[list[tuple[int, int]]]:
    """(prompt, response) of each sequence; without a mask, the first token is the prompt."""
    masks = batch.data.get("prompt_mask")
    flat = batch.flat_seqlens("packed_input_ids")
    prompts = iter(
        [1] * len(flat) if masks is None else [int(mask.sum()) for mask in masks.split(flat)]
    )
    return [
        [(p := next(prompts), length - p) for length in group]
        for group in batch.seqlens["packed_input_ids"]
    ]
