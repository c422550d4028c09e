"""The operations that engines count are those that torch counts."""

import math

import pytest
import torch
from pretend_cuda import needs_pretend_device, pretend_cuda
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.testing.backend import BackendContract
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import VOCABULARY, TinyTokenizer

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
PROMPT, RESPONSE, GROUP = 20, 12, 4
FAMILIES = ["llama", "gemma2", "gpt2", "mixtral", "qwen2_moe"]


class Subject(BackendContract):
    name = "fsdp"


class MegatronSubject(BackendContract):
    name = "megatron"
    device = "cuda:0"

    def at_device(self):
        return pretend_cuda()


SUBJECTS = {"fsdp": Subject, "megatron": MegatronSubject}
WHOLE = {"fsdp": {"share_prefixes": False}, "megatron": {}}


def _attended(query, key, value, *others, **named):
    return sdpa_flop_count(query, key, value)


def _attended_backward(grad, query, key, value, *others, **named):
    """Without the scores, which the kernel computes a second time."""
    return 2 * sdpa_flop_count(query, key, value)


def _by_experts(first, second, *others, **named):
    """[T, m] by [E, m, n] for the gradients of tokens, [m, T] by [T, n] for those of weights."""
    return 2 * first[0] * first[1] * second[-1]


def counted_by_torch(work):
    """torch knows neither the CPU's attention, nor the products of experts and with packed
    weights."""
    kernels = {
        ATTENTION: _attended,
        ATTENTION_BACKWARD: _attended_backward,
        torch.ops.aten._grouped_mm: _by_experts,
        torch.ops.mkldnn._linear_pointwise: _with_packed_weights,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        work()
    return counter.get_total_flops()


def _with_packed_weights(rows, weight, *_, out_shape=None, **__):
    return 2 * math.prod(rows) * weight[0]


def rows(*seeds):
    """For each seed, a prompt with a group of responses of the same length."""
    sequences = [text for seed in seeds for text in texts(seed)]
    return SequenceSample(
        ids=list(map(str, seeds)),
        seqlens={"packed_input_ids": [[PROMPT + RESPONSE] * GROUP] * len(seeds)},
        data={"packed_input_ids": torch.cat(sequences)},
    )


def texts(seed):
    stream = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, VOCABULARY, (PROMPT,), generator=stream)
    responses = torch.randint(3, VOCABULARY, (GROUP, RESPONSE), generator=stream)
    return [torch.cat([prompt, response]) for response in responses]


def loss(output, sample):
    return -output.logprobs.sum()


def weight(sample):
    return sum(sample.flat_seqlens("packed_input_ids"))


def logprobs(output, sample):
    return output.logprobs


def updates(engine):
    engine.train_batch(rows(1, 2), loss, weight)


def scores(engine):
    lengths = [[n - 1 for n in group] for group in rows(1, 2).seqlens["packed_input_ids"]]
    engine.forward(rows(1, 2), post_hook=logprobs, output_seqlens=lengths)


@pytest.mark.parametrize("work", [scores, updates])
@pytest.mark.parametrize("shares", [False, True], ids=["whole", "prompts once"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_operations_of_a_pass_are_those_that_torch_counts(family, shares, work):
    engine = Subject().engine(family, share_prefixes=shares)
    counted = counted_by_torch(lambda: work(engine))
    assert engine.operations.drain() == pytest.approx(counted, rel=0.03)
    assert engine.operations.drain() == 0


def test_recomputed_activations_are_not_counted():
    plain, recomputing = (Subject().engine(gradient_checkpointing=on) for on in (False, True))
    counted = [counted_by_torch(lambda engine=e: updates(engine)) for e in (plain, recomputing)]
    assert counted[1] > 1.2 * counted[0]
    assert plain.operations.drain() == recomputing.operations.drain()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_operations_of_generation_are_those_that_torch_counts(family):
    engine = Subject().engine(family, tokenizer=TinyTokenizer())
    settings = GenerationHyperparameters(
        responses_per_prompt=GROUP, max_new_tokens=RESPONSE, min_new_tokens=RESPONSE
    )
    prompts = [texts(seed)[0][:PROMPT] for seed in (1, 2)]
    sample = SequenceSample(
        ids=["1", "2"], seqlens={"packed_prompts": [[PROMPT]] * 2},
        data={"packed_prompts": torch.cat(prompts)},
    )  # fmt: skip
    seeds = list(range(2 * GROUP))
    counted = counted_by_torch(lambda: engine.generate(sample, TinyTokenizer(), settings, seeds))
    operations = engine.operations.generated([(PROMPT, [RESPONSE] * GROUP)] * 2)
    assert operations == pytest.approx(counted, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp", {"tp": 2}),
        ("fsdp", {"cp": 2}),
        ("fsdp", {"dp": 2}),
        pytest.param("megatron", {"pp": 2}, marks=needs_pretend_device),
        pytest.param("megatron", {"tp": 2}, marks=needs_pretend_device),
    ],
    ids=str,
)
def test_ranks_together_compute_what_one_rank_computes(backend, layout):
    alone = Subject().engine(share_prefixes=False)
    updates(alone)
    expected = alone.operations.drain()

    def work(rank):
        subject = SUBJECTS[backend]()
        with subject.at_device():
            engine = subject.engine(mesh=mesh_of_ranks(**layout), **WHOLE[backend])
            mine = rows(1 + rank) if layout.get("dp") else rows(1, 2)
            engine.train_batch(mine, loss, weight)
            return engine.operations.drain()

    assert sum(run_on_ranks(2, work, timeout=120)) == pytest.approx(expected, rel=0.01)
