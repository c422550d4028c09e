import math

import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.sft import SFTInterface
from rlcli.testing.tiny_engine import TinyOutput, TinyRanks, tiny_model

KEYS = {"packed_input_ids", "prompt_mask"}


def slow_loss(model, data):
    tokens, prompt = data.data["packed_input_ids"], data.data["prompt_mask"]
    total = count = start = 0
    for n in data.flat_seqlens("packed_input_ids"):
        logits = TinyOutput(model.module.model, tokens[start : start + n], [n]).logits.log_softmax(-1)
        for t in range(1, n):
            if not prompt[start + t]:
                total, count = total - float(logits[t - 1, tokens[start + t]].detach()), count + 1
        start += n
    return total / count


def test_loss_is_the_mean_over_answer_tokens_for_any_cut(rollout):
    data = rollout.select(KEYS)
    gradients = []
    for n_mbs in (1, 2, 4):
        model = tiny_model()
        expected = slow_loss(model, data)
        stats = SFTInterface().train_step(model, data, MicroBatchSpec(n_mbs=n_mbs))
        assert stats["loss"] == pytest.approx(expected, rel=1e-9)
        assert stats["ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert model.version.global_step == 1
        gradients.append(model.module.gradient)
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], gradient, atol=1e-10, rtol=1e-10)


def test_evaluate_weighs_batches_by_their_tokens(rollout):
    data, model = rollout.select(KEYS), tiny_model()
    whole = SFTInterface().evaluate(model, [data])
    parts = SFTInterface().evaluate(model, [data.select_indices([0]), data.select_indices(range(1, 8))])
    assert parts == pytest.approx(whole)
    assert whole["loss"] == pytest.approx(slow_loss(model, data))
    assert whole["tokens"] == float((~data.data["prompt_mask"]).sum())
    assert model.module.steps == 0


def test_ranks_and_an_empty_one(rollout):
    data = rollout.select(KEYS)
    expected = SFTInterface().train_step(tiny_model(), data, MicroBatchSpec())
    for shares in ([[0, 1, 2], [3, 4, 5, 6, 7]], [list(range(8)), []]):
        ranks = TinyRanks(2)

        def one_rank(rank, ranks=ranks, shares=shares):
            model = tiny_model(ranks=ranks, rank=rank)
            return SFTInterface().train_step(model, data.select_indices(shares[rank]), MicroBatchSpec(n_mbs=2))

        for stats in ranks.run(one_rank):
            assert stats == pytest.approx(expected)


def test_it_learns_and_saves(rollout, tmp_path):
    from safetensors.torch import load_file

    data, model = rollout.select(KEYS), tiny_model(lr=0.5)
    losses = [SFTInterface().train_step(model, data, MicroBatchSpec())["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] - 0.5
    SFTInterface().save(model, str(tmp_path))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["head"], model.module.model.head)
