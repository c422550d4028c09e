import pytest
import torch

from rlcli.testing.batches import END, KEYS, PAIRS, DigitTokenizer, make_batch


def test_a_key_has_the_same_values_whichever_other_keys_there_are():
    everything = make_batch(KEYS)
    assert set(everything.keys) == set(KEYS)
    for key in KEYS:
        assert torch.equal(make_batch([key]).data[key], everything.data[key])
    assert not torch.equal(
        make_batch(["rewards"], seed=1).data["rewards"], everything.data["rewards"]
    )


def test_prompts_masks_and_ends_agree():
    batch = make_batch(KEYS)
    lengths = batch.flat_seqlens("packed_input_ids")
    prompts = batch.data["packed_prompts"].split(batch.flat_seqlens("packed_prompts"))
    pieces = zip(
        batch.data["packed_input_ids"].split(lengths),
        batch.data["prompt_mask"].split(lengths),
        batch.data["seq_no_eos_mask"].tolist(),
        [(i, pair) for i, group in enumerate(PAIRS) for pair in group],
        strict=True,
    )
    for tokens, mask, no_eos, (sample, (prompt, response)) in pieces:
        assert torch.equal(tokens[mask], prompts[sample])
        assert (int(mask.sum()), len(tokens)) == (prompt, prompt + response)
        assert no_eos == (int(tokens[-1]) != END)
    assert 0 < int(batch.data["seq_no_eos_mask"].sum()) < len(lengths)
    assert torch.equal(batch.data["solved"], batch.data["rewards"] > 0)


def test_masks_of_actions_agree_with_prompts_and_each_sample_has_a_chosen_response():
    batch = make_batch(KEYS)
    lengths = batch.flat_seqlens("packed_input_ids")
    responses = torch.cat([~mask[1:] for mask in batch.data["prompt_mask"].split(lengths)])
    assert torch.equal(batch.data["loss_mask"], responses)
    chosen = batch.data["chosen"].split([len(group) for group in PAIRS])
    assert all(flags.any() for flags in chosen)
    assert not all(flags.all() for flags in chosen)


def test_empty_responses_and_empty_batches_have_valid_shapes():
    batch = make_batch(KEYS, [[(1, 0)], [(3, 0), (3, 2)]])
    assert batch.seqlens["packed_logprobs"] == [[0], [2, 4]]
    assert batch.data["seq_no_eos_mask"].tolist()[:2] == [True, True], (
        "an empty response has not ended"
    )
    assert make_batch(KEYS, []).bs == 0


def test_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match=r"'my_mask'.*known keys: packed_prompts"):
        make_batch(["my_mask"])


def test_digits_survive_a_round_trip():
    assert (
        DigitTokenizer().decode([*DigitTokenizer().encode("a 407"), END], skip_special_tokens=True)
        == "407"
    )
