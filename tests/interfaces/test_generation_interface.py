import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.testing.tiny_engine import tiny_model

SPEC = MicroBatchSpec()


@pytest.fixture
def prompts():
    tokens = torch.tensor([2, 3, 4, 5, 6, 7])
    return SequenceSample.from_default(
        ids=["a", "b", "c"], seqlens={"packed_prompts": [[3], [1], [2]]}, data={"packed_prompts": tokens}
    )


def actor(n=2, **settings):
    return PPOActorInterface(
        generation=GenerationHyperparameters(responses_per_prompt=n, max_new_tokens=6, temperature=0.8),
        **settings,
    )


def test_layout(prompts, tokenizer):
    out = actor().generate(tiny_model(tokenizer), prompts, SPEC)
    assert out.ids == prompts.ids
    assert set(out.keys) == {"packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask"}
    lengths = out.flat_seqlens("packed_input_ids")
    owners = [0, 0, 1, 1, 2, 2]
    given = prompts.data["packed_prompts"].split([3, 1, 2])
    start = action = 0
    for n, owner, no_eos in zip(lengths, owners, out.data["seq_no_eos_mask"].tolist(), strict=True):
        tokens, mask = (
            out.data["packed_input_ids"][start : start + n],
            out.data["prompt_mask"][start : start + n],
        )
        logprobs = out.data["packed_logprobs"][action : action + n - 1]
        assert torch.equal(tokens[mask], given[owner])
        assert torch.equal(mask, torch.arange(n) < len(given[owner]))
        assert (logprobs[: len(given[owner]) - 1] == 0).all()
        assert (logprobs[len(given[owner]) - 1 :] < 0).all()
        assert no_eos == (int(tokens[-1]) != tokenizer.eos_token_id)
        start, action = start + n, action + n - 1


def test_sampled_logprobs_are_those_of_inference(prompts, tokenizer):
    model = tiny_model(tokenizer)
    out = actor().generate(model, prompts, SPEC)
    again = actor().inference(model, out, MicroBatchSpec(n_mbs=3))
    torch.testing.assert_close(again.data["packed_logprobs"], out.data["packed_logprobs"], atol=1e-6, rtol=1e-6)
    same = ReferenceInterface(temperature=0.8).inference(model, out, SPEC)
    torch.testing.assert_close(same.data["packed_ref_logprobs"], out.data["packed_logprobs"], atol=1e-6, rtol=1e-6)
    assert same.seqlens["packed_ref_logprobs"] == out.seqlens["packed_logprobs"]
    other = ReferenceInterface().inference(model, out, SPEC)
    assert not torch.allclose(other.data["packed_ref_logprobs"], out.data["packed_logprobs"], atol=1e-3)


def test_a_response_depends_on_its_prompt_its_number_and_the_step(prompts, tokenizer):
    model = tiny_model(tokenizer)
    whole = actor().generate(model, prompts, SPEC)
    alone = actor().generate(model, prompts.select_indices([1]), SPEC)
    kept = whole.select_indices([1])
    assert torch.equal(alone.data["packed_input_ids"], kept.data["packed_input_ids"])
    assert torch.equal(alone.data["packed_logprobs"], kept.data["packed_logprobs"])
    model.inc_version()
    later = actor().generate(model, prompts, SPEC)
    assert later.data["packed_input_ids"].tolist() != whole.data["packed_input_ids"].tolist()


def test_best_of_k_samples_k(prompts, tokenizer):
    out = actor(n=1, generation_size=3).generate(tiny_model(tokenizer), prompts, SPEC)
    assert [len(lengths) for lengths in out.seqlens["packed_input_ids"]] == [3, 3, 3]


def test_no_prompts(prompts, tokenizer):
    out = actor().generate(tiny_model(tokenizer), prompts.select_indices([]), SPEC)
    assert out.bs == 0
    assert out.data["packed_input_ids"].dtype == torch.int64
    assert out.data["seq_no_eos_mask"].dtype == torch.bool
    empty = ReferenceInterface().inference(tiny_model(tokenizer), out, SPEC)
    assert empty.data["packed_ref_logprobs"].dtype == torch.float32
