"""Passes of a decoding as CUDA graphs, on the pretend device."""

from __future__ import annotations

import logging

import pytest
import torch
from pretend_cuda import needs_pretend_device, pretend_cuda

from rlcli.api.config import (
    FinetuneSpec,
    GenerationHyperparameters,
    ModelBackendAbstraction,
)
from rlcli.api.model import Model
from rlcli.backends._decoding_passes import CapturedPasses, PassSize
from rlcli.registry import make_backend
from rlcli.testing.backend.samples import prompts
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

pytestmark = needs_pretend_device

DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "gpt2", "granite", "gpt_neox")
LENGTH = 12
SPEC = FinetuneSpec(total_train_steps=1, dataset_size=1, train_batch_size=1)


@pytest.fixture
def captured(monkeypatch):
    """The sizes of the passes that were captured."""
    sizes = []
    capture = CapturedPasses._capture

    def watched(passes, size):
        sizes.append(size)
        capture(passes, size)

    monkeypatch.setattr(CapturedPasses, "_capture", watched)
    return sizes


def responses(device, family, dtype="float32", **settings):
    """Tokens and log-probs of the responses to a few prompts."""
    model = Model("actor", None, TinyTokenizer(), device, source=HeldSource(tiny_model(family)))
    backend = make_backend(ModelBackendAbstraction("inference", {"dtype": dtype}))
    engine = backend.initialize(model, SPEC).module
    asked = GenerationHyperparameters(max_new_tokens=LENGTH, **settings)
    inputs = prompts().to(device)
    seeds = range(inputs.bs * asked.responses_per_prompt)
    generated = engine.generate(inputs, TinyTokenizer(), asked, seeds)
    return [row.tolist() for row in generated.tokens], torch.cat(generated.logprobs).cpu()


@pytest.mark.parametrize("family", DENSE)
def test_replayed_passes_sample_what_the_cpu_samples(family, captured):
    settings = {"responses_per_prompt": 2, "top_p": 0.9, "top_k": 5, "min_new_tokens": 3}
    tokens, logprobs = responses(torch.device("cpu"), family, **settings)
    with pretend_cuda() as device:
        on_device, scores = responses(device, family, **settings)
    assert on_device == tokens
    torch.testing.assert_close(scores, logprobs, atol=1e-5, rtol=0)
    assert captured


def test_slots_are_refilled_between_replays(captured):
    settings = {"responses_per_prompt": 4, "max_concurrent_responses": 3}
    expected = responses(torch.device("cpu"), "llama", **settings)[0]
    with pretend_cuda() as device:
        assert responses(device, "llama", **settings)[0] == expected
    assert {size.rows for size in captured} <= {1, 2, 3}
    assert len(captured) == len(set(captured)), "a pass was captured twice"


def test_a_mixture_of_experts_is_not_captured(captured):
    with pretend_cuda() as device:
        responses(device, "mixtral")
    assert captured == []


def test_a_pass_that_reads_the_device_is_computed_each_time(caplog, monkeypatch):
    from rlcli.backends._generation import Sampler

    expected = responses(torch.device("cpu"), "llama")[0]
    sample = Sampler.next

    def next_after_reading(sampler, logits, drawn, uniform):
        assert float(logits.sum()) != 0.5
        return sample(sampler, logits, drawn, uniform)

    monkeypatch.setattr(Sampler, "next", next_after_reading)
    with pretend_cuda() as device, caplog.at_level(logging.WARNING):
        assert responses(device, "llama")[0] == expected
    (warning,) = caplog.messages
    assert warning.startswith("decoding without CUDA graphs: CUDA error: operation not permitted")


@pytest.mark.parametrize(
    ("needed", "computed"),
    [
        (PassSize(1, 1), PassSize(1, 128)),
        (PassSize(5, 128), PassSize(8, 128)),
        (PassSize(8, 129), PassSize(8, 256)),
        (PassSize(100, 900), PassSize(120, 1000)),
    ],
)
def test_sizes_are_rounded_up_to_powers_of_two_within_the_cache(needed, computed):
    passes = CapturedPasses(lambda size: None, PassSize(120, 1000), context=None)
    assert passes.rounded(needed) == computed
