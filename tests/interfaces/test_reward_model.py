"""The loss of a reward model, written out; `InterfaceContract` checks what holds for any
interface."""

import math

import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.errors import DataError
from rlcli.interfaces.reward_model import RewardModelInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, TinyRanks, tiny_model

SPEC = MicroBatchSpec()
UNEVEN = [[(2, 3), (2, 4)], [(1, 2), (1, 5), (1, 1), (1, 3), (1, 6), (1, 2)], [(3, 1), (3, 2)]]
"""Samples of one, three and one pairs."""


class TestContract(InterfaceContract):
    name = "reward_model"
    args = {"centering": 0.05, "use_margins": True, "pair_aggregation": "prompt"}


@pytest.fixture
def pairs():
    return make_batch(["packed_input_ids", "margins"], UNEVEN)


def scores_by_hand(module, data):
    """For each sample its (chosen score, rejected score, margin)s, one sequence at a time."""
    tokens, margins, start, number = data.data["packed_input_ids"], data.data["margins"], 0, 0
    samples = []
    for lengths in data.seqlens["packed_input_ids"]:
        scores = []
        for n in lengths:
            scores.append(TinyOutput(module, tokens[start : start + n], [n]).values[-1])
            start += n
        margin = [float(one) for one in margins[number : number + len(lengths)]]
        number += len(lengths)
        samples.append(
            [
                (scores[i], scores[i + 1], margin[i] - margin[i + 1])
                for i in range(0, len(lengths), 2)
            ]
        )
    return samples


def loss_by_hand(args, samples):
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for pairs in samples:
        share = 1 / len(pairs) if args.pair_aggregation == "prompt" else 1.0
        for chosen, rejected, margin in pairs:
            ahead = chosen - rejected - (margin if args.use_margins else 0.0)
            loss = torch.log1p(torch.exp(-ahead)) + args.centering * (chosen + rejected) ** 2
            total, weight = total + share * loss, weight + share
    return total, weight


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pair_aggregation": "prompt"},
        {"centering": 0.1},
        {"use_margins": True, "centering": 0.01},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_loss_and_gradient_are_those_of_the_formula(pairs, settings):
    """loss and gradient are those of Bradley and Terry's model"""
    args, model, twin = RewardModelInterface(**settings), tiny_model(), TinyLM()
    data = pairs if args.use_margins else pairs.select(["packed_input_ids"])
    total, weight = loss_by_hand(args, scores_by_hand(twin, pairs))
    (total / weight).backward()
    stats = args.train_step(model, data, SPEC)
    assert stats["loss_weight"] == pytest.approx(weight)
    assert stats["loss"] == pytest.approx(float(total.detach()) / weight, rel=1e-6)
    for name in ("embedding", "value_head"):
        torch.testing.assert_close(
            model.module.gradient[name], getattr(twin, name).grad, atol=1e-7, rtol=1e-6
        )
    assert not model.module.gradient["head"].any()


@pytest.mark.parametrize("aggregation", ["pair", "prompt"])
def test_evaluation_reports_accuracy_and_margin(pairs, aggregation):
    """evaluation reports accuracy, margin, scores and loss"""
    args, model = RewardModelInterface(pair_aggregation=aggregation), tiny_model(seed=1)
    with torch.no_grad():
        samples = scores_by_hand(model.module.model, pairs)
    rows = [
        (float(c), float(r), 1 / len(s) if aggregation == "prompt" else 1.0)
        for s in samples
        for c, r, _ in s
    ]
    weight = sum(share for *_, share in rows)
    evaluation = args.evaluate(model, [pairs.select_indices([0, 2]), pairs.select_indices([1])])
    expected = {
        "accuracy": sum(share * (c > r) for c, r, share in rows) / weight,
        "margin": sum(share * (c - r) for c, r, share in rows) / weight,
        "chosen_reward": sum(share * c for c, _, share in rows) / weight,
        "rejected_reward": sum(share * r for _, r, share in rows) / weight,
        "loss": sum(share * math.log1p(math.exp(r - c)) for c, r, share in rows) / weight,
        f"{aggregation}s": weight,
    }
    assert 0 < expected["accuracy"] < 1
    assert evaluation == pytest.approx(expected, rel=1e-6)
    assert args.evaluate(model, [])[f"{aggregation}s"] == 0


def test_a_pair_of_equal_scores_counts_half():
    """a model that cannot tell the answers of a pair apart is right half of the time"""
    data = make_batch(["packed_input_ids"], [[(2, 3), (2, 3)]])
    data.data["packed_input_ids"] = torch.tensor([3, 4, 5, 6, 7] * 2)
    assert RewardModelInterface().evaluate(tiny_model(), [data])["accuracy"] == 0.5


def test_inference_scores_the_last_token(pairs):
    """each sequence's reward is the value of its last token"""
    model = tiny_model()
    output = RewardModelInterface().inference(model, pairs, MicroBatchSpec(n_mbs=3))
    by_hand = [
        float(s.detach())
        for sample in scores_by_hand(model.module.model, pairs)
        for pair in sample
        for s in pair[:2]
    ]
    assert output.seqlens["rewards"] == [[1] * 2, [1] * 6, [1] * 2]
    assert output.data["rewards"].tolist() == pytest.approx(by_hand)


def test_inference_scores_any_number_of_sequences():
    """inference scores groups of any size, as rollouts have them"""
    rollout = make_batch(["packed_input_ids"], [[(2, 3)] * 3, [(1, 4)]])
    assert RewardModelInterface().inference(tiny_model(), rollout, SPEC).seqlens["rewards"] == [
        [1] * 3,
        [1],
    ]


def test_an_odd_number_of_sequences_is_refused():
    """a sample with an odd number of sequences is refused"""
    odd = make_batch(["packed_input_ids"], [[(2, 3)] * 2, [(2, 3)] * 3])
    with pytest.raises(
        DataError, match="sample s1 has 3 sequences; pairs are chosen 0, rejected 0"
    ) as caught:
        RewardModelInterface().train_step(tiny_model(), odd, SPEC)
    assert caught.value.code == "F31"


def test_unequal_numbers_of_pairs_on_ranks_change_no_gradient(pairs):
    """ranks with unequal numbers of pairs change no gradient"""
    args = RewardModelInterface(pair_aggregation="prompt", centering=0.1)
    alone, ranks = tiny_model(), TinyRanks(2)
    expected = args.train_step(alone, pairs, SPEC)

    def one_rank(rank):
        model = tiny_model(ranks=ranks, rank=rank)
        share = pairs.select_indices([1] if rank else [0, 2])
        return RewardModelInterface(pair_aggregation="prompt", centering=0.1).train_step(
            model, share, SPEC
        ), model

    for stats, model in ranks.run(one_rank):
        assert stats == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(
            model.module.gradient["value_head"], alone.module.gradient["value_head"]
        )


def test_an_evaluation_covers_all_ranks(pairs):
    """all ranks report the numbers of all held-out pairs"""
    expected = RewardModelInterface().evaluate(tiny_model(), [pairs])
    ranks, shares = TinyRanks(2), [[[0], [1]], [[2], []]]

    def one_rank(rank):
        batches = [pairs.select_indices(share) for share in shares[rank]]
        return RewardModelInterface().evaluate(tiny_model(ranks=ranks, rank=rank), batches)

    for evaluation in ranks.run(one_rank):
        assert evaluation == pytest.approx(expected, rel=1e-6)
