"""Prompts with answers to other prompts; `InterfaceContract` checks what holds for every
interface."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.mismatched import MismatchedInterface, answers_to_others
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyRanks, tiny_model

SPEC = MicroBatchSpec()


class TestContract(InterfaceContract):
    name = "mismatched"


def batch_of(*rows):
    """Rows of a prompt and its answers; a letter is a token."""
    tokens, masks, lengths = [], [], []
    for prompt, *answers in rows:
        lengths.append([len(prompt + answer) for answer in answers])
        for answer in answers:
            tokens += map(ord, prompt + answer)
            masks += [True] * len(prompt) + [False] * len(answer)
    return SequenceSample.from_default(
        ids=[f"s{number}" for number in range(len(rows))],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={"packed_input_ids": torch.tensor(tokens), "prompt_mask": torch.tensor(masks)},
        metadata={"batch_index": list(range(len(rows)))},
    )


def texts(output):
    """Prompt and answer of each sequence, apart."""
    lengths = output.flat_seqlens("mismatched_input_ids")
    tokens = output.data["mismatched_input_ids"].split(lengths)
    masks = output.data["mismatched_prompt_mask"].split(lengths)
    pairs = list(zip(tokens, masks, strict=True))
    return [(text_of(row[mask]), text_of(row[~mask])) for row, mask in pairs]


def text_of(tokens):
    return "".join(map(chr, tokens))


ROWS = (("ab", "x"), ("c", "yyyy", "z"), ("ab", "ww"), ("d", "v"))


def test_every_answer_is_used_once_and_none_for_its_own_prompt():
    """every answer is used once, and none for its own prompt"""
    output = MismatchedInterface().inference(tiny_model(), batch_of(*ROWS), SPEC)
    pairs = texts(output)
    assert [prompt for prompt, _ in pairs] == ["ab", "c", "c", "ab", "d"]
    assert sorted(answer for _, answer in pairs) in (
        ["v", "ww", "x", "yyy", "z"],  # cut to the longest sequence: five letters
        ["v", "ww", "x", "yyyy", "z"],
    )
    answers = {"ab": {"x", "ww"}, "c": {"yyyy", "z"}, "d": {"v"}}
    assert [pair for pair in pairs if pair[1] in answers[pair[0]]] == []
    assert output.seqlens["mismatched_prompt_mask"] == output.seqlens["mismatched_input_ids"]


def test_a_long_answer_to_a_long_prompt_is_cut_to_the_longest_sequence():
    """no sequence is longer than the batch's longest"""
    batch = batch_of(("aaaaaa", "x"), ("b", "yyyyyyyy"))
    assert texts(MismatchedInterface().inference(tiny_model(), batch, SPEC)) == [
        ("aaaaaa", "yyy"),
        ("b", "x"),
    ]


@pytest.mark.parametrize("shares", [[[0, 1, 2, 3], []], [[3], [0, 2], [1]]])
def test_the_ranks_that_hold_the_samples_do_not_matter(shares):
    """the ranks that hold the samples do not matter"""
    expected = texts(MismatchedInterface().inference(tiny_model(), batch_of(*ROWS), SPEC))
    ranks = TinyRanks(len(shares))

    def one_rank(rank):
        share = batch_of(*ROWS).select_indices(shares[rank])
        return MismatchedInterface().inference(tiny_model(ranks=ranks, rank=rank), share, SPEC)

    of_sample = [expected[:1], expected[1:3], expected[3:4], expected[4:]]
    for share, output in zip(shares, ranks.run(one_rank), strict=True):
        assert texts(output) == [pair for place in share for pair in of_sample[place]]


@pytest.mark.parametrize(
    ("prompts", "mixed"),
    [([], 0), ([5], 1), ([5, 5], 2), ([7, 7, 7, 1], 2), ([1, 2, 1, 2, 3, 3], 0), ([4, 3, 2, 1], 0)],
)
def test_only_answers_to_more_than_half_of_the_batch_stay_with_their_prompt(prompts, mixed):
    """answers stay with their prompt only if there is no other way"""
    others = answers_to_others(prompts)
    assert sorted(others) == list(range(len(prompts)))
    assert sum(prompts[a] == prompts[b] for a, b in enumerate(others)) == mixed
    assert len(prompts) < 2 or all(a != b for a, b in enumerate(others))
