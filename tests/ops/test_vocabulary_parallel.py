"""Scores of a head that ranks share by rows of the vocabulary, against a complete head:
values and gradients."""

import pytest
import torch
import torch.distributed as dist

from rlcli.ops.logprobs import OutputHead, token_scores
from rlcli.ops.vocabulary import VocabularyShard
from rlcli.testing.ranks import run_on_ranks

VOCABULARY, WIDTH, TOKENS = 13, 5, 7
FORMS = [
    (None, 1.0, 1.0, False),
    (5.0, 1.0, 0.7, False),
    (None, 0.25, 1.3, True),
    (3.0, 2.0, 1.0, True),
]
"""(softcap, scale, temperature, with a bias)"""


def shard_ranges(ranks, sizes=None):
    """First row and end of each rank's shard."""
    sizes = sizes or [len(piece) for piece in torch.arange(VOCABULARY).chunk(ranks)]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


def scores_and_gradients(
    hidden, weight, bias, tokens, coefficients, *, chunk, dtype=torch.float32, **form
):
    inputs = [x.clone().requires_grad_() if x is not None else None for x in (hidden, weight, bias)]
    head = OutputHead(inputs[1], inputs[2], **form)
    logprobs, entropies = token_scores(
        inputs[0], head, tokens, entropy=True, chunk=chunk, dtype=dtype
    )
    (coefficients[0] @ logprobs + coefficients[1] @ entropies).backward()
    return [logprobs.detach(), entropies.detach(), *(x.grad for x in inputs if x is not None)]


def differences(rank, ranges, form, chunk):
    """Between this rank's numbers and its part of those of a whole head, relative to the largest of
    each kind: the largest of scores, and of gradients."""
    softcap, scale, temperature, with_bias = form
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    bias = torch.randn(VOCABULARY) if with_bias else None
    tokens, coefficients = torch.randint(0, VOCABULARY, (TOKENS,)), torch.randn(2, TOKENS)
    begin, end = ranges[rank]
    settings = {"softcap": softcap, "scale": scale, "temperature": temperature}
    complete = scores_and_gradients(
        hidden, weight, bias, tokens, coefficients, chunk=chunk, **settings
    )
    shard = VocabularyShard(dist.group.WORLD, begin, VOCABULARY)
    own_bias = bias[begin:end] if with_bias else None
    sharded = scores_and_gradients(
        hidden,
        weight[begin:end],
        own_bias,
        tokens,
        coefficients,
        chunk=chunk,
        shard=shard,
        **settings,
    )
    expected = [*complete[:3], *(x[begin:end] for x in complete[3:])]
    pairs = zip(sharded, expected, strict=True)
    errors = [float((a - b).abs().max() / b.abs().max()) if len(b) else 0.0 for a, b in pairs]
    return max(errors[:2]), max(errors[2:])


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, None), (3, None), (3, [6, 0, 7])],
    ids=["7+6", "5+5+3", "a rank without rows"],
)
def test_shards_give_the_same_scores_as_a_complete_head(ranks, sizes):
    ranges = shard_ranges(ranks, sizes)

    def work(rank):
        return {
            "apart": [
                differences(rank, ranges, form, chunk) for form in FORMS for chunk in (3, 100)
            ]
        }

    for result in run_on_ranks(ranks, work):
        assert max(scores for scores, _ in result["apart"]) < 1e-6
        assert max(gradients for _, gradients in result["apart"]) < 3e-6


def test_each_rank_holds_at_most_a_chunk_of_its_own_columns(monkeypatch):
    def work(rank):
        seen = []
        original = OutputHead.logits
        monkeypatch.setattr(
            OutputHead, "logits", lambda self, h, dtype: _noted(seen, original(self, h, dtype))
        )
        differences(rank, shard_ranges(2), FORMS[0], chunk=3)
        return {"shapes": seen}

    results = run_on_ranks(2, work)
    full = [VOCABULARY] * 6
    assert [[width for _, width in rank["shapes"]] for rank in results] == [
        [*full[1:], *[7] * 5],
        [*full[1:], *[6] * 5],
    ]
    assert all(tokens <= 3 for rank in results for tokens, _ in rank["shapes"])


def _noted(seen, logits):
    seen.append(tuple(logits.shape))
    return logits


def test_default_chunks_are_equal_on_ranks_with_different_shards(monkeypatch):
    monkeypatch.setattr("rlcli.ops.logprobs.CHUNK_ELEMENTS", 12)  # 2 tokens of 5 rows, but 4 of 3

    def work(rank):
        return {"apart": differences(rank, shard_ranges(3), FORMS[2], chunk=None)}

    assert all(max(result["apart"]) < 3e-6 for result in run_on_ranks(3, work))


def test_gathered_logits_are_complete_on_every_rank():
    def work(rank):
        begin, end = shard_ranges(3)[rank]
        logits = torch.arange(2.0 * VOCABULARY).view(2, VOCABULARY)
        gathered = VocabularyShard(dist.group.WORLD, begin, VOCABULARY).gathered(
            logits[:, begin:end]
        )
        return {"same": torch.equal(gathered, logits)}

    assert all(result["same"] for result in run_on_ranks(3, work))


def test_bfloat16_shards_are_close_to_a_complete_head():
    def work(rank):
        torch.manual_seed(0)
        hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
        tokens, coefficients = torch.randint(0, VOCABULARY, (TOKENS,)), torch.randn(2, TOKENS)
        begin, end = shard_ranges(2)[rank]
        settings = {"chunk": 3, "dtype": torch.bfloat16}
        complete = scores_and_gradients(hidden, weight, None, tokens, coefficients, **settings)
        shard = VocabularyShard(dist.group.WORLD, begin, VOCABULARY)
        sharded = scores_and_gradients(
            hidden, weight[begin:end], None, tokens, coefficients, shard=shard, **settings
        )
        return {
            "scores": float((sharded[0] - complete[0]).abs().max()),
            "hidden": float((sharded[2] - complete[2]).abs().max()),
        }

    for result in run_on_ranks(2, work):
        assert result["scores"] < 1e-6
        assert result["hidden"] < 0.05
