"""The loss of supervised fine-tuning, written out; `InterfaceContract` checks what holds for any
interface."""

import math

import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.sft import SFTInterface
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, tiny_model


class TestContract(InterfaceContract):
    name = "sft"


def loss_by_hand(module, data):
    """(sum over the answers' tokens, their number), one token at a time."""
    tokens, prompt = data.data["packed_input_ids"], data.data["prompt_mask"]
    total, count, start = torch.zeros((), dtype=torch.float64), 0, 0
    for n in data.flat_seqlens("packed_input_ids"):
        scores = TinyOutput(module, tokens[start : start + n], [n]).logits.log_softmax(-1)
        for t in range(1, n):
            if not prompt[start + t]:
                total, count = total - scores[t - 1, tokens[start + t]], count + 1
        start += n
    return total, count


def test_loss_and_gradient_are_those_of_the_formula(rollout):
    """loss and gradient are the mean negative log-likelihood"""
    data, model, twin = rollout.select(["packed_input_ids", "prompt_mask"]), tiny_model(), TinyLM()
    total, count = loss_by_hand(twin, data)
    (total / count).backward()
    stats = SFTInterface().train_step(model, data, MicroBatchSpec())
    expected = float(total.detach()) / count
    assert stats["loss"] == pytest.approx(expected, rel=1e-9)
    assert stats["ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
    for name in ("embedding", "head"):
        torch.testing.assert_close(
            model.module.gradient[name], getattr(twin, name).grad, atol=1e-10, rtol=1e-10
        )


def test_evaluation_reports_the_training_loss(rollout):
    """evaluation reports the loss, its tokens and perplexity"""
    data, model = rollout.select(["packed_input_ids", "prompt_mask"]), tiny_model()
    evaluation = SFTInterface().evaluate(model, [data])
    total, count = loss_by_hand(model.module.model, data)
    assert evaluation["loss"] == pytest.approx(float(total.detach()) / count)
    assert evaluation["ppl"] == pytest.approx(math.exp(evaluation["loss"]))
    assert evaluation["tokens"] == count
    assert SFTInterface().evaluate(model, []) == {"loss": 0.0, "ppl": 1.0, "tokens": 0.0}
