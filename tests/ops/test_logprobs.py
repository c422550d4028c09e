"""Chunked log-probs and entropies against the plain formula, forward and backward."""

import pytest
import torch

from rlcli.ops.logprobs import OutputHead, token_scores


def plain(hidden, weight, bias, tokens, softcap, scale, temperature):
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("softcap", "scale", "temperature", "with_bias"),
    [
        (None, 1.0, 1.0, False),
        (5.0, 1.0, 0.7, False),
        (None, 0.25, 1.3, True),
        (3.0, 2.0, 1.0, True),
    ],
)
def test_chunks_equal_the_plain_formula_and_its_gradients(
    chunk, softcap, scale, temperature, with_bias
):
    torch.manual_seed(0)
    tokens = torch.randint(0, 13, (7,))
    inputs = [torch.randn(7, 5), torch.randn(13, 5), torch.randn(13) if with_bias else None]
    mine = [x.clone().requires_grad_() if x is not None else None for x in inputs]
    theirs = [x.clone().requires_grad_() if x is not None else None for x in inputs]
    head = OutputHead(mine[1], mine[2], softcap, scale, temperature)
    got = token_scores(mine[0], head, tokens, entropy=True, chunk=chunk)
    want = plain(theirs[0], theirs[1], theirs[2], tokens, softcap, scale, temperature)
    weights = torch.randn(2, 7)
    for (a, b), w in zip(zip(got, want, strict=True), weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        (a * w).sum().backward(retain_graph=True)
        (b * w).sum().backward(retain_graph=True)
    for a, b in zip(mine, theirs, strict=True):
        if a is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


def test_entropy_is_computed_only_on_request():
    head = OutputHead(torch.randn(4, 3))
    assert token_scores(torch.randn(2, 3), head, torch.tensor([0, 1]))[1] is None


def test_logits_are_materialised_chunk_by_chunk(monkeypatch):
    seen = []
    original = OutputHead.logits
    monkeypatch.setattr(
        OutputHead, "logits", lambda self, h, dtype: seen.append(len(h)) or original(self, h, dtype)
    )
    hidden = torch.randn(10, 3, requires_grad=True)
    token_scores(
        hidden, OutputHead(torch.randn(4, 3)), torch.zeros(10, dtype=torch.int64), chunk=4
    )[0].sum().backward()
    assert max(seen) == 4
