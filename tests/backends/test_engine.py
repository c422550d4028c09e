"""The transformers engines: packing, training against a plain reference, generation, saving."""

import math
import resource

import pytest
import torch

from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, MicroBatchSpec, ModelBackendAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.model import Model
from rlcli.checkpoint.disk import failures_told
from rlcli.errors import DataError, ModelError, ResourceError
from rlcli.registry import make_backend
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model

LENGTHS = [5, 11, 3, 8, 2, 9]


def batch(lengths=LENGTHS, seed=0):
    torch.manual_seed(seed)
    total = sum(lengths)
    return SequenceSample.from_default(
        ids=[f"s{i}" for i in range(len(lengths))],
        seqlens=lengths,
        data={"packed_input_ids": torch.randint(3, VOCABULARY, (total,)), "prompt_mask": torch.rand(total) < 0.3},
    )


def engine(backend="fsdp", family="llama", head="lm", seed=0, changes=None, **args):
    module = tiny_model(family, head=head, seed=seed, **(changes or {}))
    model = Model("actor", module, TinyTokenizer(), torch.device("cpu"))
    spec = FinetuneSpec(total_train_steps=10, dataset_size=100, train_batch_size=10)
    args = {"dtype": "float32", **args}
    return make_backend(ModelBackendAbstraction(backend, args)).initialize(model, spec).module


def answer_mask(sample):
    """[T - N]: positions whose next token is not part of the prompt."""
    keep = []
    for mask in sample.data["prompt_mask"].split(sample.flat_seqlens("packed_input_ids")):
        keep.append(~mask[1:])
    return torch.cat(keep)


def nll(output, sample):
    mask = answer_mask(sample)
    return -(output.logprobs * mask).sum(), {"tokens": mask.sum()}


def weight(sample):
    return answer_mask(sample).sum()


def reference_loss(lm, sample):
    """The same loss one sequence at a time, by transformers' own forward pass."""
    total, count = torch.zeros(()), 0
    lengths = sample.flat_seqlens("packed_input_ids")
    tokens, masks = sample.data["packed_input_ids"].split(lengths), sample.data["prompt_mask"].split(lengths)
    for ids, mask in zip(tokens, masks, strict=True):
        logits = lm(input_ids=ids[None], use_cache=False).logits[0]
        logp = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        total = total - (logp * ~mask[1:]).sum()
        count += int((~mask[1:]).sum())
    return total / count


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
def test_packed_logits_equal_those_of_each_sequence_alone(family):
    sample, plain = batch(), tiny_model(family)
    with torch.no_grad():
        want = torch.cat(
            [
                plain(input_ids=ids[None], use_cache=False).logits[0]
                for ids in sample.data["packed_input_ids"].split(LENGTHS)
            ]
        )
    for spec in (MicroBatchSpec(), MicroBatchSpec(n_mbs=3), MicroBatchSpec(max_tokens_per_mb=11)):
        torch.testing.assert_close(engine(family=family).forward(sample, spec), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_training_step_equals_a_plain_loop(family):
    sample, plain = batch(), tiny_model(family)
    matrices = [p for p in plain.parameters() if p.dim() > 1]
    vectors = [p for p in plain.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-5)
    loss = reference_loss(plain, sample)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()

    ours = engine(family=family, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    stats = ours.train_batch(sample, nll, weight, mb_spec=MicroBatchSpec(n_mbs=3))
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert stats["lr"] == 1e-2
    for (name, got), want in zip(ours.lm.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    "spec", [MicroBatchSpec(n_mbs=2), MicroBatchSpec(n_mbs=6), MicroBatchSpec(max_tokens_per_mb=12)]
)
def test_the_number_of_micro_batches_changes_nothing(spec):
    whole = engine().train_batch(batch(), nll, weight)
    parts = engine().train_batch(batch(), nll, weight, mb_spec=spec)
    assert parts == pytest.approx(whole, rel=1e-5)


def test_the_token_cap_is_a_cap():
    ours, seen = engine(), []
    ours.packed.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    ours.forward(batch(), MicroBatchSpec(max_tokens_per_mb=13))
    assert max(seen) <= 13
    assert sum(seen) == sum(LENGTHS)
    with pytest.raises(DataError, match="11"):
        ours.forward(batch(), MicroBatchSpec(max_tokens_per_mb=10))


def test_prompt_tokens_get_no_gradient():
    sample = batch([6])
    sample.data["prompt_mask"] = torch.tensor([True, True, True, True, True, False])
    ours = engine(changes={"tie_word_embeddings": False})
    ours.forward_micro_batch(sample, lambda output: nll(output, sample)[0]).backward()
    rows = ours.lm.lm_head.weight.grad.abs().sum(1)
    only = -torch.log_softmax(ours.forward(sample)[4], -1)[sample.data["packed_input_ids"][5]]
    assert rows.sum() > 0
    assert engine(changes={"tie_word_embeddings": False}).eval_batch(sample, nll, weight)["loss"] == pytest.approx(
        only.item(), rel=1e-5
    )


def test_a_non_finite_gradient_changes_no_weight():
    ours = engine()
    before = [p.clone() for p in ours.lm.parameters()]
    stats = ours.train_batch(batch(), lambda out, mb: nll(out, mb)[0] * math.nan, weight)
    assert stats["update_skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, ours.lm.parameters(), strict=True))
    assert not ours.optimizer.state


def test_a_refused_step_leaves_weights_optimizer_and_schedule():
    ours = engine()
    before = [p.clone() for p in ours.lm.parameters()]
    stats = ours.train_batch(batch(), nll, weight, step_if=lambda stats: stats["loss"] < 0)
    assert stats["update_skipped"] == 1.0
    assert stats["loss"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, ours.lm.parameters(), strict=True))
    assert all(p.grad is None for p in ours.lm.parameters())


def test_zero_weight_skips_the_update():
    stats = engine().train_batch(batch(), nll, lambda mb: 0)
    assert stats["update_skipped"] == 1.0
    assert stats["grad_norm"] == 0.0


def test_an_empty_batch_still_takes_part():
    empty = batch().select_indices([])
    assert engine().train_batch(empty, nll, weight)["update_skipped"] == 1.0
    assert len(engine().forward(empty, post_hook=lambda out, _: out.logprobs)) == 0


def test_outputs_come_back_in_the_order_of_the_input():
    sample, ours = batch(), engine()
    lengths = [[n - 1] for n in LENGTHS]
    hook = lambda output, _: output.logprobs  # noqa: E731
    whole = ours.forward(sample, MicroBatchSpec(), hook, lengths)
    torch.testing.assert_close(ours.forward(sample, MicroBatchSpec(n_mbs=6), hook, lengths), whole)


def test_values_come_from_the_value_head():
    sample = batch()
    ours, plain = engine(head="value"), tiny_model(head="value")
    with torch.no_grad():
        want = torch.cat(
            [
                plain(input_ids=ids[None], use_cache=False).logits[0, :, 0]
                for ids in sample.data["packed_input_ids"].split(LENGTHS)
            ]
        )
    torch.testing.assert_close(ours.forward(sample, post_hook=lambda out, _: out.values), want, atol=1e-5, rtol=1e-4)
    with pytest.raises(ModelError, match="language-model head"):
        ours.forward(sample, post_hook=lambda out, _: out.logprobs)


def test_bfloat16_products_stay_close_to_float32():
    fine = engine().eval_batch(batch(), nll, weight)["loss"]
    coarse = engine(dtype="bfloat16").eval_batch(batch(), nll, weight)["loss"]
    assert coarse != fine
    assert coarse == pytest.approx(fine, rel=2e-2)


def test_the_inference_backend_does_not_train():
    with pytest.raises(ModelError, match="cannot train"):
        engine("inference").train_batch(batch(), nll, weight)


def test_gradient_checkpointing_changes_no_number():
    assert engine(gradient_checkpointing=True).train_batch(batch(), nll, weight) == pytest.approx(
        engine().train_batch(batch(), nll, weight), rel=1e-5
    )


def test_the_saved_folder_is_read_by_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    ours = engine()
    ours.save_to_hf(None, str(tmp_path / "actor"))
    assert [p.name for p in tmp_path.iterdir()] == ["actor"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    for (name, got), want in zip(again.named_parameters(), ours.lm.parameters(), strict=True):
        assert torch.equal(got, want), name
    assert again.config._attn_implementation != ours.lm.config._attn_implementation


# -- generation --------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_fit_on_the_disk_leaves_the_old_one_and_nothing_else(tmp_path):
    ours = engine()
    ours.save_to_hf(None, str(tmp_path / "actor"))
    before = (tmp_path / "actor" / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ResourceError) as caught, failures_told(tmp_path):
            ours.save_to_hf(None, str(tmp_path / "actor"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.code == "F28"
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert (tmp_path / "actor" / "model.safetensors").read_bytes() == before


def prompts(lengths=(5, 9, 3, 17, 6)):
    torch.manual_seed(1)
    return SequenceSample.from_default(
        ids=[f"p{i}" for i in range(len(lengths))],
        seqlens=list(lengths),
        data={"packed_prompts": torch.randint(3, VOCABULARY, (sum(lengths),))},
    )


def generate(ours, sample, seeds=None, **settings):
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 12, **settings})
    seeds = seeds if seeds is not None else list(range(sample.bs * gconfig.responses_per_prompt))
    return ours.generate(sample, TinyTokenizer(), gconfig, seeds)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_greedy_decoding_equals_transformers_token_for_token(family, slots):
    sample, plain = prompts(), tiny_model(family)
    got = generate(engine(family=family), sample, greedy=True, max_concurrent_responses=slots)
    for i, ids in enumerate(sample.data["packed_prompts"].split(sample.flat_seqlens("packed_prompts"))):
        want = plain.generate(ids[None], max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert got.tokens[i].tolist() == want.tolist()
        assert bool(got.ended[i]) == (want[-1].item() == END)


def test_a_response_depends_on_its_prompt_and_seed_alone():
    ours, sample = engine(), prompts()
    together = generate(ours, sample, responses_per_prompt=3)
    few_slots = generate(ours, sample, responses_per_prompt=3, max_concurrent_responses=2)
    alone = generate(ours, sample.select_indices([2]), seeds=[6, 7, 8], responses_per_prompt=3)
    for i in range(15):
        assert torch.equal(together.tokens[i], few_slots.tokens[i])
    for i in range(3):
        assert torch.equal(together.tokens[6 + i], alone.tokens[i])
    assert not torch.equal(together.tokens[0], together.tokens[1])


def test_recomputation_confirms_the_log_probs():
    ours, sample = engine(), prompts()
    got = generate(ours, sample, responses_per_prompt=2, temperature=0.7, top_p=0.9, top_k=20)
    questions = sample.data["packed_prompts"].split(sample.flat_seqlens("packed_prompts"))
    whole = [torch.cat([questions[i // 2], tokens]) for i, tokens in enumerate(got.tokens)]
    packed = SequenceSample.from_default(
        ids=[str(i) for i in range(10)], seqlens=[len(x) for x in whole], data={"packed_input_ids": torch.cat(whole)}
    )

    def at_temperature(output, _):
        output.temperature = 0.7
        return output.logprobs

    again = ours.forward(packed, None, at_temperature, [[len(x) - 1] for x in whole])
    for i, part in enumerate(again.split([len(x) - 1 for x in whole])):
        torch.testing.assert_close(part[-len(got.tokens[i]) :], got.logprobs[i], atol=2e-5, rtol=1e-4)


def test_sampling_follows_the_distribution():
    ours, sample = engine(), prompts((4,))
    drawn = generate(ours, sample, responses_per_prompt=4000, max_new_tokens=1, max_concurrent_responses=4000)
    counts = torch.bincount(torch.stack(drawn.tokens)[:, 0], minlength=VOCABULARY) / 4000
    with torch.no_grad():
        want = ours.forward_micro_batch(
            SequenceSample.from_default(
                ids=["x"], seqlens=[4], data={"packed_input_ids": sample.data["packed_prompts"]}
            ),
            lambda output: output.logits[-1].softmax(-1),
        )
    assert (counts - want).abs().sum() / 2 < 0.08  # total variation; about 0.06 at 4000 draws of 97 tokens


def test_limits_on_length_and_choice():
    ours, sample = engine(), prompts()
    early = generate(ours, sample, responses_per_prompt=40, max_new_tokens=8, min_new_tokens=8)
    assert all(END not in tokens[:-1].tolist() and len(tokens) == 8 for tokens in early.tokens)
    one = generate(ours, sample, top_k=1)
    best = generate(ours, sample, greedy=True)
    assert all(torch.equal(a, b) for a, b in zip(one.tokens, best.tokens, strict=True))
    stop = int(best.tokens[0][3])
    stopped = generate(ours, sample, greedy=True, stop_token_ids=(stop,))
    assert stopped.tokens[0].tolist() == best.tokens[0][: best.tokens[0].tolist().index(stop) + 1].tolist()
    assert stopped.ended[0]


def test_padding_of_the_embedding_is_never_sampled():
    ours = engine()
    ours.vocabulary = 50
    drawn = generate(ours, prompts(), responses_per_prompt=50)
    assert max(int(tokens.max()) for tokens in drawn.tokens) < 50


def test_too_long_for_the_model_is_said_before_generating():
    with pytest.raises(ModelError, match="128 positions"):
        generate(engine(), prompts(), max_new_tokens=200)


# -- weights of other roles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [1.0, 0.25])
def test_parameters_follow_those_of_another_engine_tied_ones_once(eta):
    tied = {"tie_word_embeddings": True}
    actor, ref = engine(seed=1, changes=tied), engine("inference", seed=2, changes=tied)
    before = {name: p.clone() for name, p in ref.lm.named_parameters()}
    ref.take_parameters(actor, eta)
    for name, p in ref.lm.named_parameters():
        torch.testing.assert_close(p, eta * dict(actor.lm.named_parameters())[name] + (1 - eta) * before[name])
    assert ref.lm.lm_head.weight is ref.lm.model.embed_tokens.weight


def test_an_offloaded_model_answers_as_before():
    ours = engine("inference")
    before = ours.forward(batch())
    ours.offload()
    assert torch.equal(ours.forward(batch()), before)
