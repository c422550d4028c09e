"""DPO and its relatives, written out one token at a time; `InterfaceContract` checks what holds for
any interface."""

import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.dpo import DPOInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, TinyRanks, tiny_model

SPEC = MicroBatchSpec()
KEYS = ["packed_input_ids", "prompt_mask", "packed_ref_logprobs"]
UNEVEN = [
    [(2, 3), (2, 4)],
    [(1, 2), (1, 5), (1, 1), (1, 3), (1, 6), (1, 0)],
    [(3, 0), (3, 0)],
    [(3, 1), (3, 2)],
]
"""Samples of one, three, one and one pairs: answers of one token, an empty one,
and a pair without any token."""

SIMPO = {"reference_free": True, "length_normalized": True, "beta": 2.0, "gamma": 1.0}
VARIANTS = [
    {},
    {"beta": 0.5, "label_smoothing": 0.2},
    {"loss": "robust", "label_smoothing": 0.2, "pair_aggregation": "prompt"},
    {"loss": "ipo", "length_normalized": True},
    {"loss": "ipo", "beta": 0.4},
    {"loss": "hinge", "beta": 0.3},
    SIMPO,
    {"nll_coef": 0.7, "pair_aggregation": "prompt"},
    {"nll_coef": 0.7, "nll_aggregation": "token", "pair_aggregation": "prompt"},
]


class TestContract(InterfaceContract):
    name = "dpo"
    args = {"beta": 0.3, "label_smoothing": 0.1, "nll_coef": 0.5, "nll_aggregation": "token"}


@pytest.fixture
def pairs():
    return make_batch(KEYS, UNEVEN)


def sequences_by_hand(module, data):
    """For each sample, for each of its sequences: ([log-prob of each answer token],
    [that of the reference])."""
    tokens, prompt, reference = (data.data[key] for key in KEYS)
    start = action = 0
    samples = []
    for lengths in data.seqlens["packed_input_ids"]:
        rows = []
        for n in lengths:
            scores = TinyOutput(module, tokens[start : start + n], [n]).logits.log_softmax(-1)
            answer = [t for t in range(1, n) if not prompt[start + t]]
            logprobs = [scores[t - 1, tokens[start + t]] for t in answer]
            rows.append((logprobs, [reference[action + t - 1].double() for t in answer]))
            start, action = start + n, action + n - 1
        samples.append(rows)
    return samples


def pair_loss(args, chosen, rejected):
    """Of two sequences as above."""
    sides = []
    for logprobs, reference in (chosen, rejected):
        score = sum(logprobs, torch.zeros((), dtype=torch.float64))
        score = score if args.reference_free else score - sum(reference)
        sides.append(score / max(1, len(logprobs)) if args.length_normalized else score)
    lead, share = sides[0] - sides[1], args.label_smoothing
    right, wrong = (torch.sigmoid(sign * (args.beta * lead - args.gamma)).log() for sign in (1, -1))
    return (
        {
            "sigmoid": -(1 - share) * right - share * wrong,
            "robust": (-(1 - share) * right + share * wrong) / (1 - 2 * share),
            "ipo": (lead - 1 / (2 * args.beta)) ** 2,
            "hinge": torch.clamp(1 - args.beta * lead, min=0),
        }[args.loss],
        args.beta * sides[0],
        args.beta * sides[1],
    )


def by_hand(args, module, data):
    """(loss as it is minimised, weight, mean chosen reward, mean rejected reward, accuracy)."""
    total, weight, rewards, nll, tokens = torch.zeros((), dtype=torch.float64), 0.0, [], [], 0
    for rows in sequences_by_hand(module, data):
        pairs = [
            pair for pair in zip(rows[::2], rows[1::2], strict=True) if pair[0][0] or pair[1][0]
        ]
        for chosen, rejected in pairs:
            share = 1 / len(pairs) if args.pair_aggregation == "prompt" else 1.0
            loss, good, bad = pair_loss(args, chosen, rejected)
            total, weight = total + share * loss, weight + share
            rewards.append((share, float(good.detach()), float(bad.detach())))
            alike = args.nll_aggregation == "token"
            nll.append(
                -sum(chosen[0], torch.zeros(())) * (1 if alike else share / max(1, len(chosen[0])))
            )
            tokens += len(chosen[0])
    loss = total / weight + args.nll_coef * sum(nll) / (
        tokens if args.nll_aggregation == "token" else weight
    )
    means = [sum(share * row[i] for share, *row in rewards) / weight for i in (0, 1)]
    return loss, weight, *means, sum(share * (good > bad) for share, good, bad in rewards) / weight


@pytest.mark.parametrize(
    "settings", VARIANTS, ids=lambda settings: ",".join(map(str, settings.values())) or "dpo"
)
def test_loss_and_gradient_are_those_of_the_formula(pairs, settings):
    """loss and gradient of each variant are those of its formula"""
    args, model, twin = DPOInterface(**settings), tiny_model(), TinyLM()
    loss, weight, chosen, rejected, accuracy = by_hand(args, twin, pairs)
    loss.backward()
    stats = args.train_step(model, pairs, SPEC)
    if args.reference_free:
        assert args.train_step(tiny_model(), pairs.select(KEYS[:2]), SPEC) == stats
    assert stats["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert stats["loss_weight"] == pytest.approx(weight)
    assert (stats["chosen_reward"], stats["rejected_reward"]) == pytest.approx(
        (chosen, rejected), rel=1e-5
    )
    assert stats["margin"] == pytest.approx(chosen - rejected, rel=1e-5)
    assert stats["accuracy"] == pytest.approx(accuracy)
    for name in ("embedding", "head"):
        torch.testing.assert_close(
            model.module.gradient[name], getattr(twin, name).grad, atol=1e-6, rtol=1e-5
        )
    assert not model.module.gradient["value_head"].any()


def test_log_probs_are_reported_as_sums_over_answers(pairs):
    """log-probs of chosen and rejected answers are reported"""
    model = tiny_model()
    with torch.no_grad():
        rows = [row for sample in sequences_by_hand(model.module.model, pairs) for row in sample]
    sums = [float(sum(logprobs)) for logprobs, _ in rows]
    stats = DPOInterface().train_step(model, pairs, SPEC)
    # the sixth pair has no token
    assert stats["chosen_logprob"] == pytest.approx(sum(sums[::2]) / 5)
    assert stats["rejected_logprob"] == pytest.approx(sum(sums[1::2]) / 5)


def test_a_policy_equal_to_its_reference_has_margin_0(pairs):
    """a policy equal to its reference has margin 0, accuracy 1/2"""
    model = tiny_model()
    lengths = pairs.flat_seqlens("packed_input_ids")
    pairs.data["packed_ref_logprobs"] = TinyOutput(
        model.module.model, pairs.data["packed_input_ids"], lengths
    ).logprobs.detach()
    stats = DPOInterface().train_step(model, pairs, SPEC)
    assert (stats["margin"], stats["accuracy"]) == (0, 0.5)
    assert stats["loss"] == pytest.approx(0.6931472)


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_evaluation_gives_the_training_loss_for_any_batches(pairs, aggregation):
    """evaluation reports what training would, over all batches"""
    args = DPOInterface(nll_coef=0.5, nll_aggregation=aggregation, pair_aggregation="prompt")
    model = tiny_model()
    evaluation = args.evaluate(
        model, [pairs.select_indices(indices) for indices in ([0, 3], [1], [2])]
    )
    loss, weight, chosen, rejected, accuracy = by_hand(args, model.module.model, pairs)
    assert evaluation["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert evaluation["margin"] == pytest.approx(chosen - rejected, rel=1e-5)
    assert (evaluation["accuracy"], evaluation["prompts"]) == pytest.approx((accuracy, weight))
    assert args.evaluate(model, [])["prompts"] == 0


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_uneven_ranks_and_micro_batches_change_no_gradient(pairs, aggregation):
    """ranks with unequal numbers of pairs and tokens change nothing"""
    settings = {"nll_coef": 0.5, "nll_aggregation": aggregation, "pair_aggregation": "prompt"}
    alone, ranks = tiny_model(), TinyRanks(3)
    expected = DPOInterface(**settings).train_step(alone, pairs, SPEC)

    def one_rank(rank):
        model = tiny_model(ranks=ranks, rank=rank)
        share = pairs.select_indices([[1], [], [0, 2, 3]][rank])
        return DPOInterface(**settings).train_step(model, share, MicroBatchSpec(n_mbs=2)), model

    for stats, model in ranks.run(one_rank):
        assert stats == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(model.module.gradient["head"], alone.module.gradient["head"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "orpo"}, "loss is 'orpo'; it must be one of sigmoid, ipo, hinge, robust"),
        (
            {"loss": "ipo", "label_smoothing": 0.1},
            r"label_smoothing needs loss=sigmoid\|robust; loss is ipo",
        ),
        ({"loss": "hinge", "gamma": 0.1}, "gamma needs loss=sigmoid; loss is hinge"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5; it must be at least 0 and below 0.5"),
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        (
            {"pair_aggregation": "token"},
            "pair_aggregation is 'token'; it must be one of pair, prompt",
        ),
    ],
)
def test_settings_without_an_effect_are_refused(settings, message):
    """settings without a meaning are refused"""
    with pytest.raises(ValueError, match=message):
        DPOInterface(**settings)
