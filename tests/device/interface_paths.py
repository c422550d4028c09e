"""Paths of interfaces: every call of each, with settings that exercise different branches."""

import torch

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.model import Model, call_interface
from rlcli.registry import make_interface
from rlcli.testing.backend.base import prompts
from rlcli.testing.batches import KEYS, DigitTokenizer, make_batch
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model

from .engine_paths import CUT, role, weights


def interface(kind, **args):
    return make_interface(ModelInterfaceAbstraction(kind, args))


def rollout(device, **changes):
    """Groups of two responses with every key that a graph knows."""
    return make_batch(KEYS, vocabulary=VOCABULARY, end=END, **changes).to(device)


def data_of(sample):
    return {key: tensor.cpu() for key, tensor in sample.data.items()} | {"metadata": sample.metadata}


def two_steps(device, kind, module=None, **args):
    if kind.startswith(("ppo", "grpo")):
        args = {"generation": {"responses_per_prompt": 2}, "minibatches": 2, **args}
    built, model = interface(kind, **args), role(device, module)
    stats = [call_interface(built, "train_step", model, rollout(device, seed=seed), CUT) for seed in range(2)]
    return stats, weights(model.module)


def trains_by(kind, **args):
    head = "value" if kind in ("ppo_critic", "reward_model") else "lm"
    return lambda device, folder: two_steps(device, kind, tiny_model(head=head), **args)


def infers_by(kind, head="lm", **args):
    def path(device, folder):
        model = role(device, tiny_model(head=head), "inference")
        return data_of(call_interface(interface(kind, **args), "inference", model, rollout(device), CUT))

    return path


def evaluates_by(kind, **args):
    def path(device, folder):
        parts = [rollout(device, seed=seed) for seed in range(2)]
        return call_interface(interface(kind, **args), "evaluate", role(device), parts)

    return path


def reference_stores_log_probs(device, folder):
    """The first call computes log-probs, the second one reads them."""
    model, outputs = role(device, backend="inference"), []
    for _ in range(2):
        keeps = interface("reference", store=str(folder / "kept"))
        outputs.append(data_of(call_interface(keeps, "inference", model, rollout(device), CUT)))
    return outputs


def actor_generates(device, folder):
    args = {"generation": {"responses_per_prompt": 2, "max_new_tokens": 6}}
    model = role(device, backend="inference")
    return data_of(call_interface(interface("ppo_actor", **args), "generate", model, prompts().to(device), CUT))


def classifier_rewards(device, folder):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = byte_tokens()
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=64, **size)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = Model("reward", None, tokenizer, device)
    built = interface("hf_reward", path=str(folder), output="prob", batch_size=3)
    return data_of(call_interface(built, "inference", model, rollout(device), CUT))


def byte_tokens():
    from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

    return as_transformers(byte_tokenizer())


def rule_rewards(device, folder):
    model = Model("reward", None, byte_tokens(), device)
    return data_of(call_interface(interface("math_reward"), "inference", model, rollout(device), CUT))


def distils(device, folder):
    built, model = interface("distill"), role(device)
    batch = rollout(device).select(["packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs"])
    return call_interface(built, "train_step", model, batch, CUT), weights(model.module)


def distils_full_distributions(device, folder):
    built, batch = interface("distill", estimator="full"), rollout(device).select(["packed_input_ids", "prompt_mask"])
    batch.update_(call_interface(built, "inference", role(device, backend="inference", seed=1), batch, CUT))
    model = role(device)
    return call_interface(built, "train_step", model, batch, CUT), weights(model.module)


def reads_scores(kind, **args):
    """An interface without a model that reads the keys written by rewards."""

    def path(device, folder):
        model = Model("reward", None, None, device)
        return data_of(call_interface(interface(kind, **args), "inference", model, rollout(device), CUT))

    return path


def programs_are_judged(device, folder):
    """Only the output matters for a device, so it is mocked."""
    return data_of(interface("code_reward").mock("inference", Model("reward", None, None, device), rollout(device)))


def a_role_judges(device, folder):
    """The judge reads and writes digits."""
    of_digits = {"highest": 1e9, "max_error_fraction": 1.0, "template": "{response}"}
    model = role(device, backend="inference", tokenizer=DigitTokenizer())
    built = interface("role_judge", thought_tokens=3, **of_digits)
    return data_of(call_interface(built, "inference", model, rollout(device), CUT))


def interfaces_are_mocked(device, folder):
    """Mocks answer without an engine."""
    samples, outputs = rollout(device), []
    model = Model("actor", None, TinyTokenizer(), device, seed=3)
    for kind, call in (("ppo_actor", "generate"), ("ppo_actor", "inference"), ("ppo_critic", "inference")):
        outputs.append(data_of(interface(kind).mock(call, model, samples)))
    return outputs


INTERFACES = {
    "sft": trains_by("sft"),
    "sft, evaluation": evaluates_by("sft"),
    "dpo": trains_by("dpo", nll_coef=0.5, nll_aggregation="token"),
    "dpo, evaluation": evaluates_by("dpo", pair_aggregation="prompt"),
    "reward model": trains_by("reward_model"),
    "reward model, scores": infers_by("reward_model", head="value"),
    "actor": trains_by("ppo_actor"),
    "actor, dense rewards": trains_by("ppo_actor", use_dense_reward=True),
    "actor, no critic": trains_by("ppo_actor", disable_value=True, kl_ctl=0, entropy_coef=0.01),
    "actor, groups": trains_by("ppo_actor", group_adv_norm=True, mask_too_long=True, mask_no_eos_with_zero=True),
    "actor, decoupled": trains_by("ppo_actor", use_decoupled_loss=True, behav_imp_weight_cap=2.0, kl_estimator="k3"),
    "actor, recomputed": trains_by("ppo_actor", recompute_logprob=True, adaptive_kl_ctl=True, c_clip=3.0),
    "grpo": trains_by("grpo"),
    "grpo, by sequences": trains_by(
        "grpo", policy_loss="gspo", baseline="leave_one_out", scale="batch", kl_in="reward"
    ),
    "grpo, by tokens": trains_by(
        "grpo",
        policy_loss="cispo",
        loss_aggregation="constant",
        loss_constant=8.0,
        credit="to_go",
        adv_norm=True,
        overlong_buffer=4,
    ),
    "actor, best of two": trains_by("ppo_actor", generation={"responses_per_prompt": 1}, generation_size=2),
    "critic": trains_by("ppo_critic"),
    "critic, other settings": trains_by("ppo_critic", value_norm_type="ma", value_loss="huber", bootstrap_no_eos=False),
    "log-probs": infers_by("ppo_actor"),
    "reference": infers_by("reference", temperature=0.7),
    "reference, kept": reference_stores_log_probs,
    "values": infers_by("ppo_critic", head="value"),
    "responses": actor_generates,
    "classifier": classifier_rewards,
    "rule": rule_rewards,
    "best of n": trains_by("best_of_n"),
    "distill": distils,
    "distill, whole distributions": distils_full_distributions,
    "weighted sum": reads_scores("weighted_sum", weights={"rewards": 1.0, "solved": 0.5}),
    "group filter": reads_scores("group_filter", by="solved"),
    "programs": programs_are_judged,
    "judge": a_role_judges,
    "mocks": interfaces_are_mocked,
}
