"""Paths of interfaces: every call of each, under settings that take other ways through it."""

import torch
from reading_tokenizer import ReadingTokenizer

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import FORKS, PROMPT_MASK, SEQUENCES
from rlcli.api.model import Model, call_interface
from rlcli.registry import make_interface
from rlcli.testing.backend.samples import prompts
from rlcli.testing.batches import KEYS, DigitTokenizer, make_batch
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model

from .engine_paths import CUT, role, weights


def interface(kind, **args):
    return make_interface(ModelInterfaceAbstraction(kind, args))


def rollout(device, **changes):
    """Groups of two responses with every key that a graph knows."""
    return make_batch(KEYS, vocabulary=VOCABULARY, end=END, **changes).to(device)


def forked_rollout(device, **changes):
    """Each response has two rows: the last token of its prompt begins the second one."""
    batch = rollout(device, **changes)
    prompt = batch.data[PROMPT_MASK]
    forks = {FORKS: prompt & ~prompt.roll(-1)}
    lengths = batch.seqlens[SEQUENCES]
    batch.update_(SequenceSample.from_default(ids=batch.ids, seqlens=lengths, data=forks))
    return batch


def data_of(sample):
    return {key: tensor.cpu() for key, tensor in sample.data.items()} | {
        "metadata": sample.metadata
    }


def two_steps(device, kind, module=None, leaving_out=(), batch_of=rollout, **args):
    if kind.startswith("ppo"):
        args = {"minibatches": 2, **args}
    made, model = interface(kind, **args), role(device, module)
    batches = [
        batch_of(device, seed=seed).select(key for key in KEYS if key not in leaving_out)
        for seed in range(2)
    ]
    return [call_interface(made, "train_step", model, batch, CUT) for batch in batches], weights(
        model.module
    )


def trains_by(kind, **args):
    head = "value" if kind in ("ppo_critic", "reward_model") else "lm"
    return lambda device, folder: two_steps(device, kind, tiny_model(head=head), **args)


def infers_by(kind, head="lm", batch_of=rollout, **args):
    def path(device, folder):
        model = role(device, tiny_model(head=head), "inference")
        return data_of(
            call_interface(interface(kind, **args), "inference", model, batch_of(device), CUT)
        )

    return path


def evaluates_by(kind, **args):
    def path(device, folder):
        parts = [rollout(device, seed=seed) for seed in range(2)]
        return call_interface(interface(kind, **args), "evaluate", role(device), parts)

    return path


def reference_keeps_what_it_computes(device, folder):
    """Computed, and then read."""
    model, made = role(device, backend="inference"), []
    for _ in range(2):
        keeps = interface("reference", store=str(folder / "kept"))
        made.append(data_of(call_interface(keeps, "inference", model, rollout(device), CUT)))
    return made


def actor_generates(device, folder):
    args = {"generation": {"responses_per_prompt": 2, "max_new_tokens": 6}}
    model = role(device, backend="inference")
    return data_of(
        call_interface(interface("ppo_actor", **args), "generate", model, prompts().to(device), CUT)
    )


def plays_games(device, folder):
    args = {"responses_per_prompt": 2, "max_new_tokens": 16}
    limits = {"max_turns": 2, "turn_tokens": 4, "scored": True, "turn_rewards": True}
    game = interface("episodes", environment="guess", generation=args, **limits)
    sampler = role(device, backend="inference", tokenizer=ReadingTokenizer())
    asked = prompts().to(device)
    return data_of(call_interface(game, "generate", sampler, asked, CUT))


def classifier_rewards(device, folder):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = byte_tokens()
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=64, **size
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = Model("reward", None, tokenizer, device)
    made = interface("hf_reward", path=str(folder), output="prob", batch_size=3)
    return data_of(call_interface(made, "inference", model, rollout(device), CUT))


def byte_tokens():
    from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

    return as_transformers(byte_tokenizer())


def rule_rewards(device, folder):
    model = Model("reward", None, byte_tokens(), device)
    return data_of(
        call_interface(interface("math_reward"), "inference", model, rollout(device), CUT)
    )


def distils(device, folder):
    made, model = interface("distill"), role(device)
    batch = rollout(device).select(
        ["packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs"]
    )
    return call_interface(made, "train_step", model, batch, CUT), weights(model.module)


def distils_whole_distributions(device, folder):
    made, batch = (
        interface("distill", estimator="full"),
        rollout(device).select(["packed_input_ids", "prompt_mask"]),
    )
    batch.update_(
        call_interface(made, "inference", role(device, backend="inference", seed=1), batch, CUT)
    )
    model = role(device)
    return call_interface(made, "train_step", model, batch, CUT), weights(model.module)


def reads_scores(kind, **args):
    """An interface that needs no model, on what rewards wrote."""

    def path(device, folder):
        model = Model("reward", None, None, device)
        return data_of(
            call_interface(interface(kind, **args), "inference", model, rollout(device), CUT)
        )

    return path


def programs_are_judged(device, folder):
    """As far as a device matters: what is made of the marks."""
    return data_of(
        interface("code_reward").mock(
            "inference", Model("reward", None, None, device), rollout(device)
        )
    )


def a_role_judges(device, folder):
    """Digits of the question are what it is asked; what it writes are digits."""
    of_digits = {"highest": 1e9, "max_error_fraction": 1.0, "template": "{response}"}
    model = role(device, backend="inference", tokenizer=DigitTokenizer())
    made = interface("role_judge", thought_tokens=3, **of_digits)
    return data_of(call_interface(made, "inference", model, rollout(device), CUT))


def interfaces_pretend(device, folder):
    """Mocks, which answer for an engine that is not there."""
    given, made = rollout(device), []
    model = Model("actor", None, TinyTokenizer(), device, seed=3)
    for kind, call, args in (
        ("ppo_actor", "generate", {}),
        ("ppo_actor", "inference", {}),
        ("ppo_critic", "inference", {}),
        ("episodes", "generate", {"environment": "guess", "scored": True, "turn_rewards": True}),
    ):
        made.append(data_of(interface(kind, **args).mock(call, model, given)))
    return made


INTERFACES = {
    "sft": trains_by("sft"),
    "sft, evaluation": evaluates_by("sft"),
    "dpo": trains_by("dpo", nll_coef=0.5, nll_aggregation="token"),
    "dpo, evaluation": evaluates_by("dpo", pair_aggregation="prompt"),
    "answers judged alone": trains_by("kto", undesirable_weight=0.5),
    "answers judged alone, evaluation": evaluates_by("kto", loss="apo_zero_unpaired"),
    "answers to other prompts": infers_by("mismatched"),
    "reward model": trains_by("reward_model"),
    "reward model, scores": infers_by("reward_model", head="value"),
    "actor": trains_by("ppo_actor"),
    "actor, nothing recomputed": trains_by("ppo_actor", leaving_out=("proximal_logprobs",)),
    "actor, by sequences": trains_by(
        "ppo_actor", policy_loss="gspo", loss_aggregation="sequence", entropy_coef=0.01
    ),
    "actor, by tokens": trains_by(
        "ppo_actor",
        policy_loss="cispo",
        loss_aggregation="constant",
        loss_constant=8.0,
        kl_gradient="naive",
    ),
    "actor, soft gate": trains_by("ppo_actor", policy_loss="sapo"),
    "actor, total variation": trains_by("ppo_actor", policy_loss="dppo_tv"),
    "actor, binary KL": trains_by("ppo_actor", policy_loss="dppo_kl", eps_clip=0.05),
    "actor, whole responses": trains_by("ppo_actor", policy_loss="sequence"),
    "actor, dual clip": trains_by("ppo_actor", c_clip=3.0),
    "actor, forks": trains_by("ppo_actor", batch_of=forked_rollout),
    "advantages": infers_by("gae"),
    "advantages, dense rewards": infers_by("gae", use_dense_reward=True),
    "advantages, no critic": infers_by("gae", disable_value=True, kl_ctl=0),
    "advantages, groups": infers_by(
        "gae", group_adv_norm=True, mask_too_long=True, mask_no_eos_with_zero=True
    ),
    "advantages, decoupled": infers_by(
        "gae", use_decoupled_loss=True, behav_imp_weight_cap=2.0, kl_estimator="k3"
    ),
    "advantages, one weight per response": infers_by(
        "gae",
        use_decoupled_loss=True,
        behav_imp_weight_cap=2.0,
        behav_imp_weight_floor=0.5,
        behav_imp_weight_level="geometric",
    ),
    "advantages, recomputed": infers_by(
        "gae", recompute_logprob=True, adaptive_kl_ctl=True, bootstrap_no_eos=False
    ),
    "advantages, best of two": infers_by("gae", train_on_best=1),
    "advantages, forks": infers_by("gae", batch_of=forked_rollout),
    "relative advantages": infers_by("group_relative"),
    "relative advantages, over the mean": infers_by("group_relative", scale="mean"),
    "relative advantages, over the batch": infers_by(
        "group_relative", baseline="leave_one_out", scale="batch", kl_in="reward"
    ),
    "relative advantages, to go": infers_by(
        "group_relative",
        baseline="batch",
        credit="to_go",
        adv_norm=True,
        overlong_buffer=4,
        overlong_limit=8,
    ),
    "critic": trains_by("ppo_critic"),
    "critic, other settings": trains_by("ppo_critic", value_norm_type="ma", value_loss="huber"),
    "log-probs": infers_by("ppo_actor"),
    "log-probs, forks": infers_by("ppo_actor", batch_of=forked_rollout),
    "reference": infers_by("reference", temperature=0.7),
    "reference, kept": reference_keeps_what_it_computes,
    "values": infers_by("ppo_critic", head="value"),
    "responses": actor_generates,
    "games": plays_games,
    "classifier": classifier_rewards,
    "rule": rule_rewards,
    "best of n": trains_by("best_of_n"),
    "distill": distils,
    "distill, whole distributions": distils_whole_distributions,
    "weighted sum": reads_scores("weighted_sum", weights={"rewards": 1.0, "solved": 0.5}),
    "weighted sum, normalised": reads_scores(
        "weighted_sum", weights={"rewards": 1.0, "solved": 0.5}, group_norm=True
    ),
    "group filter": reads_scores("group_filter", by="solved"),
    "programs": programs_are_judged,
    "judge": a_role_judges,
    "mocks": interfaces_pretend,
}
