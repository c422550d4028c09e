"""Checks of inference: a sample's result depends on this sample and the model,
and on nothing around it."""

from __future__ import annotations

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import LOGPROBS, MEANINGS, REWARDS, SEQUENCES, minus_one
from rlcli.testing.batches import PAIRS
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import (
    at_actions,
    last_rows,
    padded,
    trained_actions,
    with_tensor,
)
from rlcli.testing.interface.inference_trial import (
    CallSubject,
    CallTrial,
    usual_batch,
    with_temperature,
)
from rlcli.testing.interface.logprobs import SHIFTED, check_logprobs, computed_logprobs
from rlcli.testing.interface.mocks import check_mock
from rlcli.testing.interface.outputs import (
    check_drops,
    check_numbers,
    check_same,
    drops,
    tensor_of,
)
from rlcli.testing.interface.training_trial import (
    Batches,
    Make,
    Rehearsal,
    State,
    difference_of_states,
    group_size,
    overrides,
    place_of_call,
    state_through_json,
)
from rlcli.testing.tiny_engine import TinyRanks

EDGES = {
    "one sample": [[(3, 4)]],
    "one token": [[(1, 1)], [(2, 3)]],
    "an empty response": [[(3, 0)], [(2, 2), (2, 0)]],
    "very ragged": [[(1, 1), (2, 60)], [(40, 1)], [(2, 2)] * 5],
}
"""(prompt, response) lengths of batches that break code written with only one batch in mind."""

CRITIC_RATES = (0.02, 0.5)
"""Learning rates of a critic: a bounded gradient gets nowhere with the lower one."""
STEPS_OF_A_CRITIC = 12
ONE_EACH = "one entry of seqlens for each sequence of each sample"


class InferenceChecks(CallSubject):
    def test_its_inference_can_be_tried(self, make: Make, request: pytest.FixtureRequest) -> None:
        """a batch can be made with the keys that inference reads"""
        skip_unless(overrides(make(), "inference"), "has no inference")
        self.demand_batch("inference", "inference_batches", request)

    def test_inference_returns_what_it_declares(self, inferring: CallTrial) -> None:
        """inference returns its samples with the declared keys,
        and drops them for declared reasons"""
        inferring.check_form(inferring.result, inferring.batch.ids)
        check_drops(inferring.result, inferring.interface.drops("inference"), inferring.where)

    def test_single_responses_are_not_all_dropped(
        self, inferring: CallTrial, inference_batches: Batches
    ) -> None:
        """of samples with one response some are not dropped, unless more are needed"""
        interface = inferring.interface
        skip_unless(interface.drops("inference"), "drops no samples")
        skip_if(group_size(interface, "inference") > 1, "needs several responses to a prompt")
        batch = usual_batch(inference_batches, [group[:1] for group in PAIRS])
        reasons = drops(inferring.run(batch)).values()
        if all(reasons):
            raise Violation(
                f"all of {batch.bs} samples with one response are dropped: {set(reasons)}",
                "one response cannot differ from others: keep it, or declare NEEDS_GROUP",
                inferring.where,
            )

    def test_inference_reads_what_it_declares(self, inferring: CallTrial) -> None:
        """inference needs no key that it does not declare"""
        declared = inferring.interface.reads("inference")
        if declared is None:
            pytest.skip("not tried: inference is not in READS")
        try:
            inferring.run(inferring.batch.select(inferring.batch.keys & {*declared.needed}))
        except (KeyError, ValueError) as error:
            raise Violation(
                "inference fails with the keys that READS says it needs "
                f"({', '.join(declared.needed)}): {type(error).__name__}: {error}",
                "name in READS all that it reads, or do without it",
                inferring.where,
            ) from error

    def test_inference_has_a_row_for_every_token_or_sequence(self, inferring: CallTrial) -> None:
        """outputs have the lengths that their keys stand for"""
        skip_unless(inferring.result.keys, "returns no keys")
        tokens = inferring.batch.seqlens[SEQUENCES]
        for key in inferring.result.keys:
            lengths, meaning = inferring.result.seqlens[key], MEANINGS.get(key)
            expected = lengths if list(map(len, lengths)) == list(map(len, tokens)) else tokens
            if meaning is not None and not meaning.has_own_sequences:
                expected = [[meaning.rows(length) for length in group] for group in tokens]
            for id_, actual, right in zip(inferring.batch.ids, lengths, expected, strict=True):
                if actual != right:
                    raise Violation(
                        f"{key} of sample {id_} has lengths {actual}, not {right}",
                        (SHIFTED if "logprobs" in key else ONE_EACH),
                        inferring.where,
                    )

    def test_inference_returns_plain_numbers(self, inferring: CallTrial) -> None:
        """outputs are finite float32 without a gradient"""
        check_numbers(inferring.result, inferring.where)

    @pytest.mark.parametrize(
        "spec",
        [MicroBatchSpec(n_mbs=2), MicroBatchSpec(n_mbs=5), MicroBatchSpec(max_tokens_per_mb=25)],
        ids=["2", "5", "25 tokens"],
    )
    def test_inference_is_the_same_for_any_micro_batches(
        self, inferring: CallTrial, spec: MicroBatchSpec
    ) -> None:
        """inference is the same for any micro-batches"""
        longest = max(map(sum, inferring.batch.seqlens.get("packed_input_ids", [[0]])))
        if spec.max_tokens_per_mb is not None:
            spec = MicroBatchSpec(max_tokens_per_mb=max(longest, spec.max_tokens_per_mb))
        inferring.demand_same(
            inferring.run(inferring.batch, spec),
            "between one micro-batch and "
            f"{spec.n_mbs if spec.n_mbs > 1 else 'as many as the token cap requires'}",
            "model.module.forward puts the rows of micro-batches back in "
            "order; pass mb_spec on to it",
        )

    def test_inference_does_not_depend_on_the_order(self, inferring: CallTrial) -> None:
        """inference does not depend on the order of samples"""
        inferring.check_order("a row belongs to the sample at the same place; undo any sorting")

    def test_inference_does_not_depend_on_the_other_samples(self, inferring: CallTrial) -> None:
        """a sample gets the same alone as in the batch"""
        skip_if(inferring.takes_batch, "compares the samples of a batch (TAKES_BATCH)")
        inferring.check_alone(
            "it looks across samples: padding that is counted, a mean over the batch, the row of a "
            "neighbour; declare it in TAKES_BATCH if it should compare them"
        )

    def test_inference_is_the_same_on_any_ranks(self, inferring: CallTrial) -> None:
        """inference is the same on 1, 2, 3 and an idle rank, and so is its state"""
        alone = inferring.make()
        expected, state = inferring.run(interface=alone), state_through_json(alone)
        cause = "compute a sample from itself alone; only training reduces over ranks"
        if inferring.takes_batch:
            cause = "sum what spans samples over the ranks, on each of them: model.all_reduce"
        for shares in _shares(inferring.batch.bs):
            for rank, (output, state_there) in enumerate(_on_ranks(inferring, shares)):
                holds = f"which holds {len(shares[rank])} samples"
                ranks = f"1 rank and rank {rank} of {len(shares)}, {holds}"
                check_same(expected, output, f"between {ranks}", cause, inferring.where)
                if mismatch := difference_of_states(state, state_there):
                    numbers = f"{mismatch.first:.6g} and {mismatch.second:.6g}"
                    raise Violation(
                        f"{mismatch.name} is {numbers} on {ranks}",
                        "the state must be the same on all ranks: compute it from sums over them",
                        place_of_call(alone, "state_dict"),
                    )

    def test_only_responses_count(self, inferring: CallTrial, inference_batches: Batches) -> None:
        """actions outside responses get 0, and for numbers of actions prompts do not matter if no
        model reads them"""
        keys = _made_per_action(inferring.result)
        skip_unless(keys, "returns nothing per action")
        short = usual_batch(
            inference_batches, [[(1, response) for _, response in group] for group in PAIRS]
        )
        longer, model = padded(short, in_front=True), inferring.model()
        acting, acting_later = trained_actions(short), trained_actions(longer)
        if acting is None or acting_later is None:
            pytest.skip("reads no prompt_mask")
        output = inferring.run(longer, model=model)
        cause = (
            "use action_mask(prompt_mask, lengths) before any mean, sum or normalisation, "
            "and in what is returned"
        )
        for key in keys:
            if outside := int(tensor_of(output, key)[~acting_later].count_nonzero()):
                raise Violation(
                    f"{key} is not 0 for {outside} actions that chose no token of a response",
                    cause,
                    inferring.where,
                )
        if not model.module.micro_batches:
            with_longer = at_actions(output, acting_later)
            without = at_actions(inferring.run(short), acting)
            check_same(without, with_longer, "with longer prompts", cause, inferring.where)

    def test_inference_leaves_everything_alone(self, inferring: CallTrial) -> None:
        """inference changes neither its input nor the model, and uses it without dropout"""
        inferring.check_left_alone()

    def test_inference_is_deterministic(self, inferring: CallTrial) -> None:
        """inference is deterministic"""
        again = inferring.run(interface=inferring.make())
        cause = "something is drawn without a seed; use stable_seed(model.seed, id, …)"
        inferring.demand_same(again, "between two calls alike", cause, exact=True)

    def test_logprobs_are_those_of_the_model(self, inferring: CallTrial) -> None:
        """log-probs equal an independent computation"""
        keys = computed_logprobs(inferring.result, inferring.batch)
        skip_unless(keys, "computes no log-probs")
        temperature = 0.7
        interface = with_temperature(inferring.make, inferring.interface, temperature)
        if interface is None:
            temperature, interface = 1.0, inferring.interface
        model = inferring.model()
        output = inferring.run(interface=interface, model=model)
        for key in keys:
            check_logprobs(output, key, inferring.batch, model.module, temperature, inferring.where)

    def test_values_come_in_the_units_of_the_reward(self, make: Make, batches: Batches) -> None:
        """values approach the observed returns, in their units"""
        interface, reward = make(), 10.0
        reads, writes = interface.reads("train_step"), interface.writes("inference")
        targets = {"returns", "rewards"} & set(reads.needed if reads else ())
        skip_unless(targets and writes and "values" in writes.all, "predicts no returns")
        batch = usual_batch(batches)
        batch.data |= {key: torch.full_like(tensor_of(batch, key), reward) for key in targets}
        tries = (_distances_while_learning(make, batches, batch, reward, lr) for lr in CRITIC_RATES)
        first, last = min(tries, key=lambda distances: distances[1] / distances[0])
        if last > 0.9 * first:
            off = f"{first:.3g} off at first, {last:.3g} at last"
            raise Violation(
                f"all {min(targets)} are {reward:g}; values are {off}",
                "denormalise what the model predicts, if it learns normalised returns",
                place_of_call(interface, "inference"),
            )

    def test_a_score_depends_on_the_last_token(self, inferring: CallTrial) -> None:
        """a reward that the model's values give depends on a sequence's last token"""
        heads = inferring.interface.heads("inference")
        if heads is None or "value" not in heads.needed or REWARDS not in inferring.result.keys:
            pytest.skip("gives no rewards by a model's values")
        batch = inferring.batch
        tokens = tensor_of(batch, SEQUENCES).clone()
        last = last_rows(batch)
        tokens[last] = tokens[last] % (len(inferring.tokenizer) - 1) + 1
        changed = inferring.run(with_tensor(batch, SEQUENCES, tokens))
        before, after = (tensor_of(output, REWARDS) for output in (inferring.result, changed))
        if same := int((before == after).sum()):
            raise Violation(
                f"{same} of {len(before)} rewards are the same with another last token",
                "score a sequence by the value of its last token, which has seen all of it",
                inferring.where,
            )

    @pytest.mark.parametrize("edge", EDGES)
    def test_edge_batches_of_inference(
        self, inferring: CallTrial, inference_batches: Batches, edge: str
    ) -> None:
        """inference of edge-case batches"""
        batch = usual_batch(inference_batches, EDGES[edge])
        output = inferring.run(batch)
        inferring.check_form(output, batch.ids)
        check_numbers(output, inferring.where)

    def test_state_of_inference_comes_back(self, inferring: CallTrial) -> None:
        """its state is JSON and can be restored"""
        skip_unless(overrides(inferring.interface, "state_dict"), "keeps no state")
        unbroken, resumed, batch = inferring.make(), inferring.make(), inferring.batch
        inferring.run(batch, interface=unbroken)
        resumed.load_state_dict(state_through_json(unbroken))
        (expected, state), (actual, restored) = (
            (inferring.run(batch, interface=interface), state_through_json(interface))
            for interface in (unbroken, resumed)
        )
        cause = (
            "state_dict leaves out what inference changes in the interface, or "
            "load_state_dict ignores it"
        )
        where = place_of_call(unbroken, "state_dict")
        between = "between a run without a break and a restarted one"
        check_same(expected, actual, between, cause, where, exact=True)
        if state != restored:
            raise Violation(
                f"the state is {state} without a break, {restored} after a restart",
                cause,
                where,
            )

    def test_inference_of_no_samples(self, inferring: CallTrial) -> None:
        """inference of no samples has the same keys and dtypes"""
        inferring.check_no_samples()

    def test_mock_of_inference(self, inferring: CallTrial) -> None:
        """mock of inference looks like the real thing"""
        check_mock(inferring)


def _distances_while_learning(
    make: Make, batches: Batches, batch: SequenceSample, target: float, lr: float
) -> tuple[float, float]:
    """How far values are from their target before the first and before the last step of a critic at
    this learning rate."""
    rehearsal, interface = Rehearsal(make, batches), make()
    model, distances = rehearsal.model(lr=lr), []
    for _ in range(STEPS_OF_A_CRITIC):
        batch = rehearsal.fit(batch, model, interface)
        distances.append(float((tensor_of(batch, "values") - target).abs().mean()))
        rehearsal.train(batch, model=model, interface=interface)
    return distances[0], distances[-1]


def _shares(count: int) -> list[list[range]]:
    """Ways to divide a batch of this many samples among ranks."""
    half, third = count // 2, count // 3
    thirds = [range(third), range(third, 2 * third + 1), range(2 * third + 1, count)]
    return [[range(half), range(half, count)], thirds, [range(count), range(0)]]


def _on_ranks(inferring: CallTrial, shares: list[range]) -> list[tuple[SequenceSample, State]]:
    """The output and then the state of each rank, if each has its share of the batch."""
    ranks = TinyRanks(len(shares))

    def on_rank(rank: int) -> tuple[SequenceSample, State]:
        interface, model = inferring.make(), inferring.model(ranks=ranks, rank=rank)
        share = inferring.batch.select_indices(shares[rank])
        output = inferring.run(share, MicroBatchSpec(n_mbs=2), model, interface)
        return output, state_through_json(interface)

    return ranks.run(on_rank)


def _made_per_action(output: SequenceSample) -> list[str]:
    """The keys with a number or a flag for each action, other than log-probs,
    which every token has."""
    return [
        key
        for key in output.keys
        if key in MEANINGS
        and MEANINGS[key].rows is minus_one
        and MEANINGS[key].numbers is not LOGPROBS
    ]
