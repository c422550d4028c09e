"""Cheap checks, once for each value of every flag and choice, and not only for the defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import ADVANTAGES, REWARDS
from rlcli.testing.arguments import (
    Changes,
    arguments_of,
    check_variants,
    run_each,
    silent_arguments,
)
from rlcli.testing.contract import skip_if, skip_unless
from rlcli.testing.effects import Effects
from rlcli.testing.interface.advantages import AdvantageChecks
from rlcli.testing.interface.arguments import EffectSubject, batches_for, only_rewards
from rlcli.testing.interface.credit import CreditChecks
from rlcli.testing.interface.directions import DirectionChecks
from rlcli.testing.interface.edge_cases import EdgeChecks
from rlcli.testing.interface.equal_weights import EqualWeightChecks
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallTrial, inference_batches_for
from rlcli.testing.interface.invariants import LawChecks
from rlcli.testing.interface.layouts import InvarianceChecks
from rlcli.testing.interface.prompts import PromptChecks
from rlcli.testing.interface.reward import RewardChecks
from rlcli.testing.interface.texts import Gold
from rlcli.testing.interface.training import TrainingChecks
from rlcli.testing.interface.training_trial import Batches, Make, Rehearsal, overrides

INVARIANCES: Sequence[Callable[[Any, Rehearsal], None]] = (
    TrainingChecks.test_the_loss_is_finite,
    InvarianceChecks.test_micro_batches_change_nothing,
    InvarianceChecks.test_order_changes_nothing,
    InvarianceChecks.test_padding_changes_nothing,
)
OF_TRAINING: Sequence[Callable[[Any, Rehearsal], None]] = (
    *INVARIANCES,
    TrainingChecks.test_masked_tokens_get_no_gradient,
    TrainingChecks.test_numbers_on_prompts_are_not_read,
    TrainingChecks.test_goes_on_from_its_state,
    EqualWeightChecks.test_a_policy_is_at_no_distance_from_itself,
    EqualWeightChecks.test_a_distance_from_a_reference_is_the_kl,
    DirectionChecks.test_advantages_teach_in_their_direction,
    PromptChecks.test_longer_prompts_change_nothing,
    EdgeChecks.test_all_masked,
    LawChecks.test_a_step_moves_a_pair_apart,
    LawChecks.test_one_side_of_pairs_is_reported_by_itself,
)
"""Not the comparison of ranks: a choice may be to let each have its own share."""
OF_REWARDS: Sequence[Callable[[Any, CallTrial], None]] = (
    InferenceChecks.test_inference_returns_what_it_declares,
    InferenceChecks.test_inference_returns_plain_numbers,
    RewardChecks.demand_less_for_wrong_examples,
)
"""A reward may take a second for a batch, to execute programs."""
OF_INFERENCE = (
    *OF_REWARDS,
    InferenceChecks.test_inference_does_not_depend_on_the_other_samples,
    InferenceChecks.test_inference_does_not_depend_on_the_order,
    InferenceChecks.test_inference_leaves_everything_alone,
    InferenceChecks.test_state_of_inference_comes_back,
)
OF_ADVANTAGES = (
    AdvantageChecks.test_a_reward_reaches_its_last_action,
    AdvantageChecks.test_a_reward_of_a_token_counts_for_the_action_that_chose_it,
    AdvantageChecks.test_the_order_within_a_group_changes_nothing,
    AdvantageChecks.test_nothing_comes_after_an_end,
    AdvantageChecks.test_returns_are_in_the_units_of_the_rewards,
    AdvantageChecks.test_a_penalty_is_paid_once,
    AdvantageChecks.test_a_penalty_does_not_fall_with_the_distance,
    CreditChecks.test_a_discount_counts_for_each_token,
)


class VariantChecks(EffectSubject):
    def test_every_variant_trains(self, rehearsal: Rehearsal, effects: Effects) -> None:
        """with each value of each flag and choice, a step is finite, resumes, and depends on
        neither micro-batches, order, padding nor prompts"""

        def check(changes: Changes) -> None:
            run_each(OF_TRAINING, self, _training_with(changes, rehearsal))

        check_variants(_variants(rehearsal.make(), effects), check)

    def test_what_is_off_by_default_trains(self, rehearsal: Rehearsal, effects: Effects) -> None:
        """with each number that is off by default, a step is finite, and depends on neither
        micro-batches, order nor padding"""

        def check(changes: Changes) -> None:
            run_each(INVARIANCES, self, _training_with(changes, rehearsal))

        check_variants(_switched_on(rehearsal.make(), effects), check)

    def test_every_variant_infers(
        self, batches: Batches, inferring: CallTrial, effects: Effects
    ) -> None:
        """with each value of each flag and choice, inference is finite and as declared, a sample
        gets the same in any batch, and the laws of advantages hold"""

        def check(changes: Changes) -> None:
            changed = _inferring_with(changes, inferring, batches)
            keys = changed.result.keys
            run_each(OF_REWARDS if REWARDS in keys else OF_INFERENCE, self, changed)
            run_each(OF_ADVANTAGES if ADVANTAGES in keys else (), self, changed)

        check_variants(_variants(inferring.interface, effects), check)

    def test_what_is_off_by_default_infers(
        self, batches: Batches, inferring: CallTrial, effects: Effects
    ) -> None:
        """with each number that is off by default, inference is finite and as declared, and a
        sample gets the same in any batch"""
        skip_if(
            overrides(inferring.interface, "train_step"),
            "not tried: what it infers is read by its training",
        )

        def check(changes: Changes) -> None:
            run_each(OF_INFERENCE, self, _inferring_with(changes, inferring, batches))

        check_variants(_switched_on(inferring.interface, effects), check)

    def test_every_variant_scores(
        self,
        scorer: ModelInterface,
        inferring: CallTrial,
        answers: Sequence[str],
        gold: Gold,
        effects: Effects,
    ) -> None:
        """with another value of each argument a run gives what score_texts gives; with another
        flag or choice right answers earn more than wrong ones"""
        tokenizer, rewards = inferring.tokenizer, RewardChecks()

        def check(changes: Changes) -> None:
            variant = _changed(inferring.make, changes)
            changed = CallTrial(variant, "inference", inferring.batch, tokenizer)
            scorer = changed.interface
            rewards.test_a_run_gives_what_score_texts_gives(scorer, changed, tokenizer)
            if all(isinstance(value, bool | str) for value in changes.values()):
                rewards.test_right_answers_earn_more_than_wrong_ones(
                    scorer, answers, gold, lambda *_: None
                )

        check_variants(effects.of_each_argument(), check)


def _variants(interface: ModelInterface, effects: Effects) -> list[Changes]:
    """Skips the check without any. Effects of rewards are not looked for, which may take long."""
    everything = [argument.name for argument in arguments_of(interface)]
    silent = everything if only_rewards(interface) else silent_arguments(type(interface))
    variants = list(effects.variants(silent))
    skip_unless(variants, "has neither flags nor choices")
    return variants


def _switched_on(interface: ModelInterface, effects: Effects) -> list[Changes]:
    """Skips the check without any."""
    skip_if(only_rewards(interface), "only its author knows which texts show an effect")
    numbers = list(effects.switched_on(silent_arguments(type(interface))))
    skip_unless(numbers, "has no number that is off by default")
    return numbers


def _training_with(changes: Changes, rehearsal: Rehearsal) -> Rehearsal:
    variant = _changed(rehearsal.make, changes)
    return Rehearsal(variant, batches_for(variant(), rehearsal.batches))


def _inferring_with(changes: Changes, inferring: CallTrial, batches: Batches) -> CallTrial:
    variant, batch = _changed(inferring.make, changes), inferring.batch
    interface = variant()
    declared = interface.reads("inference")
    if declared is not None and not set(declared.needed) <= batch.keys:
        batch = inference_batches_for(interface, batches, inferring.tokenizer)()
    return CallTrial(variant, "inference", batch, inferring.tokenizer)


def _changed(make: Make, changes: Changes) -> Make:
    def changed(**further: Any) -> ModelInterface:
        return make(**changes, **further)

    return changed
