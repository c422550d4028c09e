"""`attention: auto | torch | flash` on engines over transformers, on a pretend CUDA device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from cuda_libraries import deepspeed_on_cuda
from fake_flash_attn import flash_attn_installed
from pretend_cuda import needs_pretend_device, pretend_cuda

from rlcli.backends._zero import import_deepspeed
from rlcli.errors import ModelError, UsageError
from rlcli.ops.flash_attention import FlashAttention
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.forward import scores
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.samples import batch, prompts
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks

pytestmark = needs_pretend_device
NARROW = {"dtype": "bfloat16"} | SETTINGS


def contract(backend, device="cuda:0"):
    subject = type("Subject", (BackendContract,), {"name": backend, "args": {}, "device": device})
    return subject()


@pytest.fixture
def calls(monkeypatch):
    """The sequences of each call of flash-attn."""
    seen, attend = [], FlashAttention.attend

    def counted(self, query, key, value, queries, *others):
        seen.append(len(queries.starts) - 1)
        return attend(self, query, key, value, queries, *others)

    monkeypatch.setattr(FlashAttention, "attend", counted)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_training_and_generation_with_flash_attn_equal_those_with_torchs_kernels(
    backend, family, calls
):
    """gemma2 has windows and capped scores."""
    import_deepspeed(torch.device("cpu"))  # as other tests of the process import it
    with (
        pretend_cuda() as device,
        flash_attn_installed("FlashAttention-2"),
        deepspeed_on_cuda() if backend == "deepspeed" else nullcontext(),
    ):
        of_torch, logprobs = results(backend, family, "torch", device)
        assert not calls
        of_flash, other_logprobs = results(backend, family, "flash", device)
    assert of_flash["loss"] == pytest.approx(of_torch["loss"], rel=1e-2)
    assert of_flash["grad_norm"] == pytest.approx(of_torch["grad_norm"], rel=3e-2)
    torch.testing.assert_close(other_logprobs, logprobs, atol=5e-2, rtol=0)
    assert set(calls) >= {len(batch().flat_seqlens("packed_input_ids")), len(prompts().ids)}


def results(backend, family, attention, device):
    """Statistics of an update after a generation, and the log-probs that follow."""
    engine = contract(backend).engine(family, attention=attention, **NARROW)
    generate(engine, prompts(), greedy=True)
    stats = engine.train_batch(batch().to(device), answer_loss, answer_weight)
    return stats, scores(engine, batch(), "log-probs")


def test_inference_takes_flash_attn_by_itself_where_it_is_installed(calls):
    with pretend_cuda():
        without = contract("inference").engine("gemma2", dtype="bfloat16")
        expected = scores(without, batch(), "log-probs")
        assert not calls
        with flash_attn_installed("FlashAttention-2"):
            engine = contract("inference").engine("gemma2", dtype="bfloat16")
        torch.testing.assert_close(
            scores(engine, batch(), "log-probs"), expected, atol=5e-2, rtol=0
        )
        assert calls


def test_context_parallel_ranks_attend_with_flash_attn_in_ulysses(calls):
    """A ring merges parts of the attention, for which it takes torch's kernels."""

    def scored(engine):
        calls.clear()
        return scores(engine, batch(), "log-probs").tolist(), len(calls)

    def work(rank):
        with pretend_cuda(), flash_attn_installed("FlashAttention-2"):
            engines = {
                method: contract("inference").engine(
                    "gemma2",
                    mesh=mesh_of_ranks(cp=2),
                    context_parallel=method,
                    attention=attention,
                    dtype="bfloat16",
                )
                for method, attention in (("ulysses", "flash"), ("ring", "torch"))
            }
            return {method: scored(engine) for method, engine in engines.items()}

    layers = 2
    for result in run_on_ranks(2, work, timeout=120):
        (of_flash, flash_calls), (of_ring, ring_calls) = result["ulysses"], result["ring"]
        assert (flash_calls, ring_calls) == (layers, 0)
        torch.testing.assert_close(torch.tensor(of_flash), torch.tensor(of_ring), atol=5e-2, rtol=0)


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cpu", "CUDA devices, not on cpu"), ("cuda:0", "FlashAttention-2: ")],
)
def test_flash_attn_that_cannot_be_had_is_refused_with_what_to_do(device, reason):
    with pretend_cuda(), flash_attn_installed(), pytest.raises(ModelError, match=reason) as caught:
        contract("fsdp", device).engine(attention="flash", dtype="bfloat16")
    assert "rlcli doctor" in caught.value.hint
    assert "models.actor.backend.args.attention=auto" in caught.value.hint


def test_flash_attn_needs_a_precision_of_16_bits():
    with pytest.raises(UsageError, match="attention=flash needs dtype"):
        contract("fsdp").backend(attention="flash", dtype="float32")
