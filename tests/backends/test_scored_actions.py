"""The head is computed for the actions that a loss reads, and for no others."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rlcli.backends._prefix_sharing import PrefixSharing
from rlcli.backends._sharding import clip_gradients
from rlcli.backends._transformers import PackedModel
from rlcli.ops.logprobs import OutputHead
from rlcli.ops.shared_prefixes import Work
from rlcli.testing.tiny_models import VOCABULARY, tiny_model

CPU = torch.device("cpu")
ALWAYS = PrefixSharing(Work(of_token=1.0, of_key=0.0, skips_hidden=True), CPU, None)
PROMPT, RESPONSES = 6, (4, 1, 3)


def batch():
    """A group of responses to one prompt, and which actions chose a token of a response."""
    stream = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, VOCABULARY, (PROMPT,), generator=stream)
    parts, actions = [], []
    for length in RESPONSES:
        parts += [prompt, torch.randint(3, VOCABULARY, (length,), generator=stream)]
        actions += [False] * (PROMPT - 1) + [True] * length
    lengths = tuple(PROMPT + length for length in RESPONSES)
    return torch.cat(parts), lengths, torch.tensor(actions)


def scores_and_gradients(lm, share, requested, read):
    """Log-probs and entropies, if these actions are requested (None: all), and the gradients of a
    loss that reads the actions `read`."""
    tokens, lengths, _ = batch()
    packed = PackedModel(lm, torch.float32, share=share)

    def scores(output):
        output.actions = requested
        return output.entropy, output.logprobs

    lm.zero_grad()
    entropy, logprobs = packed(tokens, lengths, scores)
    (logprobs[read].sum() + 0.3 * entropy[read].sum()).backward()
    gradients = [parameter.grad.clone() for parameter in lm.parameters()]
    return entropy.detach(), logprobs.detach(), gradients


@pytest.mark.parametrize("share", [None, ALWAYS.layout], ids=["whole", "shared prefixes"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_requested_actions_have_the_same_scores_and_gradients(family, share):
    lm, (_, _, read) = tiny_model(family), batch()
    expected, results = (
        scores_and_gradients(lm, share, requested, read) for requested in (None, read)
    )
    for scores, all_scores in zip(results[:2], expected[:2], strict=True):
        torch.testing.assert_close(scores[read], all_scores[read], atol=1e-6, rtol=1e-6)
        assert not scores[~read].any()
        assert all_scores[~read].all()
    for gradient, reference in zip(results[2], expected[2], strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("share", [None, ALWAYS.layout], ids=["whole", "shared prefixes"])
def test_the_head_sees_as_many_rows_as_actions_are_requested(share, monkeypatch):
    rows, original = [], OutputHead.logits
    monkeypatch.setattr(
        OutputHead,
        "logits",
        lambda self, hidden, dtype: rows.append(len(hidden)) or original(self, hidden, dtype),
    )
    _, _, read = batch()
    scores_and_gradients(tiny_model("llama"), share, read, read)
    assert rows == [sum(RESPONSES)]  # once, forward: the backward pass has these logits


def test_without_requested_actions_gradients_are_zero():
    lm, (_, _, read) = tiny_model("llama"), batch()
    none = torch.zeros_like(read)
    entropy, logprobs, gradients = scores_and_gradients(lm, None, none, read)
    assert not entropy.any()
    assert not logprobs.any()
    assert not any(gradient.any() for gradient in gradients)


def products(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_an_unrequested_token_saves_all_its_products_with_the_head():
    lm, (_, _, read) = tiny_model("llama"), batch()
    every = torch.ones_like(read)
    saved = products(lambda: scores_and_gradients(lm, None, every, read)) - products(
        lambda: scores_and_gradients(lm, None, read, read)
    )
    head = lm.get_output_embeddings().weight.numel()
    assert saved == 6 * head * int((~read).sum())


def test_gradients_within_the_limit_are_not_touched(monkeypatch):
    scaled = []
    monkeypatch.setattr(
        nn.utils, "clip_grads_with_norm_", lambda *arguments: scaled.append(arguments)
    )
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], 6.0) == 5.0
    assert not scaled
    assert clip_gradients([parameter], 5.0) == 5.0
    assert len(scaled) == 1
