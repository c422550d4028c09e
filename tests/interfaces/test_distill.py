"""On-policy distillation: the reverse KL and its gradient, by hand and by enumeration."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.distill import DistillInterface
from rlcli.ops.distillation import full_reverse_kl, sampled_reverse_kl
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, tiny_model

SPEC = MicroBatchSpec()


class TestContract(InterfaceContract):
    name = "distill"
    args = {"minibatches": 1}


def test_the_expected_gradient_of_a_sampled_token_is_that_of_the_full_kl():
    """over a softmax of five tokens: sum of p · gradient of the sampled term = gradient of the
    KL"""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    full = full_reverse_kl(logits.log_softmax(-1)[None], teacher[None])
    (exact,) = torch.autograd.grad(full.sum(), logits)
    logprobs = logits.log_softmax(-1)
    terms = sampled_reverse_kl(logprobs, teacher, logprobs.detach(), 2.0)
    (expected,) = torch.autograd.grad((logprobs.exp().detach() * terms).sum(), logits)
    torch.testing.assert_close(expected, exact)
    by_hand = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logits),
        torch.distributions.Categorical(logits=teacher),
    )
    assert float(full) == pytest.approx(float(by_hand))


def test_tokens_of_an_older_policy_are_weighted_by_the_ratio():
    """with w = p / p_sampled the expectation over the older policy is the same, up to the cap"""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    older, teacher = (
        torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(
        full_reverse_kl(logprobs[None], teacher[None]).sum(), logits, retain_graph=True
    )
    terms = sampled_reverse_kl(logprobs, teacher, older, 1e9)
    (expected,) = torch.autograd.grad((older.exp() * terms).sum(), logits, retain_graph=True)
    torch.testing.assert_close(expected, exact)
    capped = sampled_reverse_kl(logprobs, teacher, older, 0.5)
    weight = (logprobs.detach() - older).exp().clamp(max=0.5)
    torch.testing.assert_close(capped, 0.5 * weight * (logprobs - teacher) ** 2)


@pytest.fixture
def rollout():
    """Ragged responses, one of a single token, with the teacher's log-probs of the whole
    vocabulary."""
    data = make_batch(["packed_input_ids", "prompt_mask"], [[(2, 4), (2, 1)], [(3, 2), (3, 5)]])
    lengths = data.flat_seqlens("packed_input_ids")
    student, teacher = (distributions(TinyLM(seed=seed), data) for seed in (0, 7))
    following = torch.cat([t[1:] for t in data.data["packed_input_ids"].split(lengths)])
    rows = [[n - 1 for n in group] for group in data.seqlens["packed_input_ids"]]
    columns = {
        "packed_logprobs": student.gather(1, following[:, None])[:, 0],
        "packed_ref_logprobs": teacher.gather(1, following[:, None])[:, 0],
        "teacher_distributions": teacher,
    }
    data.update_(
        SequenceSample.from_default(
            ids=data.ids, seqlens=dict.fromkeys(columns, rows), data=columns
        )
    )
    return data


def distributions(module, data):
    """[T - N, V] log-probs of the next tokens."""
    rows, start = [], 0
    for n in data.flat_seqlens("packed_input_ids"):
        tokens = data.data["packed_input_ids"][start : start + n]
        rows.append(TinyOutput(module, tokens, [n]).logits.log_softmax(-1)[:-1])
        start += n
    return torch.cat(rows).detach()


def test_the_full_loss_is_the_mean_kl_of_response_tokens(rollout):
    """with estimator: full, the loss is the mean KL per response token"""
    model, twin = tiny_model(), TinyLM()
    lengths = rollout.flat_seqlens("packed_input_ids")
    mask = torch.cat([~m[1:] for m in rollout.data["prompt_mask"].split(lengths)])
    rows, start = [], 0
    for n in lengths:
        tokens = rollout.data["packed_input_ids"][start : start + n]
        rows.append(TinyOutput(twin, tokens, [n]).logits.log_softmax(-1)[:-1])
        start += n
    student, teacher = torch.cat(rows)[mask], rollout.data["teacher_distributions"][mask]
    expected = (student.exp() * (student - teacher)).sum() / mask.sum()
    expected.backward()
    stats = DistillInterface(estimator="full", minibatches=1).train_step(model, rollout, SPEC)
    assert stats["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert stats["reverse_kl"] == pytest.approx(float(expected.detach()), rel=1e-5)
    for name in ("embedding", "head"):
        torch.testing.assert_close(
            model.module.gradient[name], getattr(twin, name).grad, atol=1e-6, rtol=1e-5
        )


def test_the_sampled_loss_is_half_the_squared_log_ratio(rollout):
    """with estimator: sampled, the gradient is that of half the squared log-ratio,
    per response token"""
    model = tiny_model()
    stats = DistillInterface(minibatches=1).train_step(model, rollout, SPEC)
    lengths = rollout.flat_seqlens("packed_input_ids")
    mask = torch.cat([~m[1:] for m in rollout.data["prompt_mask"].split(lengths)])
    ratio = (rollout.data["packed_logprobs"] - rollout.data["packed_ref_logprobs"])[mask]
    assert stats["reverse_kl"] == pytest.approx(
        float((ratio + (-ratio).exp() - 1).mean()), rel=1e-5
    )
    assert stats["loss"] == pytest.approx(float(0.5 * ratio.square().mean()), rel=1e-5)


@pytest.mark.parametrize("estimator", ["sampled", "full"])
def test_the_temperature_divides_the_students_logits(rollout, estimator):
    """the temperature divides the student's logits"""
    stats = DistillInterface(estimator=estimator, temperature=0.5, minibatches=1).train_step(
        tiny_model(), rollout, SPEC
    )
    lengths = rollout.flat_seqlens("packed_input_ids")
    mask = torch.cat([~m[1:] for m in rollout.data["prompt_mask"].split(lengths)])
    logits = torch.cat(
        [
            TinyOutput(TinyLM(), tokens, [len(tokens)]).logits[:-1]
            for tokens in rollout.data["packed_input_ids"].split(lengths)
        ]
    )
    student, teacher = (
        (logits / 0.5).log_softmax(-1).detach(),
        rollout.data["teacher_distributions"],
    )
    if estimator == "full":
        expected = (student.exp() * (student - teacher)).sum(-1)
    else:
        following = torch.cat([t[1:] for t in rollout.data["packed_input_ids"].split(lengths)])[
            :, None
        ]
        chosen = student.gather(1, following)[:, 0]
        distance = rollout.data["packed_ref_logprobs"] - chosen
        since_sampling = (chosen - rollout.data["packed_logprobs"]).exp()
        expected = since_sampling * (distance.exp() - 1 - distance)
    assert stats["reverse_kl"] == pytest.approx(float(expected[mask].mean()), rel=1e-5)


def test_the_distance_is_that_of_the_updated_student_not_of_the_one_that_sampled():
    """averaged over all tokens that the older student may sample, each as often as it does"""
    batch = make_batch(["packed_input_ids", "prompt_mask"], [[(1, 1)]] * 11)
    batch.data["packed_input_ids"] = torch.tensor([[0, sampled] for sampled in range(11)]).ravel()
    student, older, teacher = (distributions(TinyLM(seed=seed), batch)[0] for seed in (0, 1, 7))
    columns = {"packed_logprobs": older, "packed_ref_logprobs": teacher}
    seqlens = dict.fromkeys(columns, [[1]] * 11)
    batch.update_(SequenceSample.from_default(ids=batch.ids, seqlens=seqlens, data=columns))
    interface = DistillInterface(minibatches=1)
    reported = [
        interface.train_step(tiny_model(), sample, SPEC)["reverse_kl"] for sample in batch.unpack()
    ]
    expected = full_reverse_kl(student[None], teacher[None])
    torch.testing.assert_close((older.exp() * torch.tensor(reported)).sum(), expected[0])


def test_a_student_equal_to_its_teacher_has_no_gradient(rollout):
    """a student that is its own teacher has no gradient"""
    for estimator in ("sampled", "full"):
        data, model = rollout.select(rollout.keys), tiny_model()
        data.data["packed_ref_logprobs"] = data.data["packed_logprobs"]
        data.data["teacher_distributions"] = distributions(TinyLM(), rollout)
        stats = DistillInterface(estimator=estimator, minibatches=1).train_step(model, data, SPEC)
        assert stats["loss"] == pytest.approx(0, abs=1e-6)
        assert stats["grad_norm"] == pytest.approx(0, abs=1e-4)


def test_inference_gives_the_log_probs_of_all_next_tokens(rollout):
    """inference gives the log-probs of all next tokens"""
    output = DistillInterface().inference(tiny_model(), rollout.select(["packed_input_ids"]), SPEC)
    torch.testing.assert_close(
        output.data["teacher_distributions"], distributions(TinyLM(), rollout).float()
    )


def test_a_cap_of_weights_is_refused_where_no_token_is_weighted():
    with pytest.raises(ValueError, match="ratio_cap needs estimator=sampled; estimator is full"):
        DistillInterface(estimator="full", ratio_cap=4.0)
