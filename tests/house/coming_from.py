"""Writes docs/coming-from.md: other frameworks' commands and keys next to ours.

    python tests/house/coming_from.py

What a key is called here comes from the tables that rlcli itself translates with. This file only
knows which framework uses a word: those of TRL are the fields of its configurations (1.12), the
others' are from their documented configurations. The metrics of TRL (1.12) and verl are those
that their trainers log. A test compares the page with what is written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rlcli import registry
from rlcli.recipe.synonyms import SYNONYMS

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"

WORDS = {
    "TRL": (
        "adam_beta1 adam_beta2 adam_epsilon batch_size beta bf16 center_rewards_coefficient "
        "cliprange cliprange_value data_seed dataset_name dataset_text_field deepspeed delta "
        "epsilon epsilon_high eval_on_start eval_steps eval_strategy fp16 gamma "
        "generation_batch_size generation_kwargs gradient_accumulation_steps greater_is_better "
        "importance_sampling_level kl_coef lam learning_rate load_best_model_at_end "
        "local_rollout_forward_batch_size log_completions loss_type lr_scheduler_type "
        "mask_truncated_completions max_completion_length max_length max_steps "
        "metric_for_best_model missing_eos_penalty model_name_or_path "
        "num_completions_to_print num_generations num_iterations num_mini_batches num_ppo_epochs "
        "num_train_epochs optim output_dir per_device_train_batch_size report_to response_length "
        "reward_funcs reward_model_path reward_weights run_name sapo_temperature_neg "
        "sapo_temperature_pos save_steps save_strategy save_total_limit "
        "multi_objective_aggregation scale_rewards sft_model_path shuffle_dataset stop_token "
        "stop_token_id total_episodes "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_mode "
        "vllm_tensor_parallel_size "
        "warmup_steps weight_decay whiten_rewards"
    ),
    "verl": (
        "adv_estimator clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low "
        "cliprange_value custom_reward_function default_local_dir entropy_coeff experiment_name "
        "filter_overlong_prompts fsdp_size gamma grad_clip kl_coef kl_ctrl.horizon kl_ctrl.type "
        "kl_loss_coef kl_loss_type kl_penalty lam log_prob_micro_batch_size_per_gpu "
        "log_val_generations loss_agg_mode loss_mode lr lr_warmup_steps lr_warmup_steps_ratio "
        "max_actor_ckpt_to_keep max_critic_ckpt_to_keep max_prompt_length max_response_length "
        "n_gpus_per_node nnodes norm_adv_by_std_in_grpo overlong_buffer.len "
        "overlong_buffer.penalty_factor ppo_max_token_len_per_gpu "
        "ppo_micro_batch_size_per_gpu ppo_mini_batch_size project_name prompt_key reward_model "
        "rollout.n save_freq target_kl tensor_model_parallel_size test_freq total_epochs "
        "model.path reward_model.model.path rollout.name rollout.temperature rollout.top_k "
        "rollout.top_p rollout_is rollout_is_threshold rollout_rs "
        "total_training_steps train_batch_size train_files trainer.device trainer.logger "
        "truncation ulysses_sequence_parallel_size use_dynamic_bsz use_kl_in_reward use_kl_loss "
        "use_prefix_grouper val_before_train val_files warmup_style weight_decay"
    ),
    "OpenRLHF": (
        "actor_learning_rate actor_num_gpus_per_node actor_num_nodes advantage_estimator bf16 "
        "ckpt_path critic_learning_rate critic_pretrain dual_clip entropy_loss_coef "
        "eps_clip_low_high eval_dataset eval_steps gamma generate_max_len init_kl_coef input_key "
        "input_template kl_horizon kl_target l2 label_key lambd lr_scheduler lr_warmup_ratio "
        "max_ckpt_num max_epochs max_len max_norm max_samples micro_rollout_batch_size "
        "micro_train_batch_size n_samples_per_prompt num_episodes overlong_buffer_len "
        "overlong_penalty_factor policy_loss_type pretrain prompt_data prompt_max_len "
        "remote_rm_url reward_clip_range reward_pretrain ring_attn_size rollout_batch_size "
        "save_path save_steps train_batch_size use_kl_loss use_tensorboard use_wandb value_clip "
        "wandb_project wandb_run_name"
    ),
    "axolotl": (
        "adam_beta1 adam_beta2 adam_epsilon base_model bf16 chat_template cosine_min_lr_ratio "
        "deepspeed eval_steps eval_strategy evals_per_epoch fp16 gradient_accumulation_steps "
        "learning_rate log_completions lr_scheduler max_steps micro_batch_size num_epochs "
        "num_generations optimizer output_dir reward_funcs rl save_steps save_strategy "
        "save_total_limit saves_per_epoch sequence_len tokenizer_config use_tensorboard "
        "val_set_size wandb_project warmup_ratio warmup_steps weight_decay"
    ),
}
"""Framework → words that it uses, as in the tables: the last part of its key, or its last parts."""

COMMANDS = [
    (
        "fine-tune on examples",
        {
            "TRL": "trl sft --model_name_or_path M --dataset_name D",
            "verl": "torchrun … -m verl.trainer.fsdp_sft_trainer data.train_files=D",
            "OpenRLHF": "deepspeed --module openrlhf.cli.train_sft --pretrain M --dataset D",
            "axolotl": "axolotl train config.yaml",
        },
        "rlcli train sft --model M --data D",
    ),
    (
        "learn from pairs",
        {
            "TRL": "trl dpo --model_name_or_path M --dataset_name D",
            "OpenRLHF": "deepspeed --module openrlhf.cli.train_dpo --pretrain M --dataset D",
            "axolotl": "axolotl train config.yaml (rl: dpo)",
        },
        "rlcli train dpo --model M --data D",
    ),
    (
        "learn from answers judged alone",
        {
            "TRL": "trl kto --model_name_or_path M --dataset_name D",
            "axolotl": "axolotl train config.yaml (rl: kto)",
        },
        "rlcli train kto --model M --data D",
    ),
    (
        "train a reward model",
        {
            "TRL": "trl reward --model_name_or_path M --dataset_name D",
            "OpenRLHF": "deepspeed --module openrlhf.cli.train_rm --pretrain M --dataset D",
            "axolotl": "axolotl train config.yaml (reward_model: true)",
        },
        "rlcli train reward --model M --data D",
    ),
    (
        "PPO",
        {
            "verl": "python3 -m verl.trainer.main_ppo data.train_files=D",
            "OpenRLHF": "python3 -m openrlhf.cli.train_ppo_ray --pretrain M --prompt_data D",
        },
        "rlcli train ppo --model M --data D",
    ),
    (
        "GRPO",
        {
            "TRL": "trl grpo --model_name_or_path M --dataset_name D",
            "verl": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo",
            "OpenRLHF": "python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator group_norm",
            "axolotl": "axolotl train config.yaml (rl: grpo)",
        },
        "rlcli train grpo --model M --data D",
    ),
    (
        "look at data before training",
        {"axolotl": "axolotl preprocess config.yaml --debug"},
        "rlcli check RECIPE; rlcli tokens RECIPE",
    ),
    (
        "a folder for transformers",
        {
            "verl": "python3 -m verl.model_merger merge --local_dir C --target_dir O",
            "axolotl": "axolotl merge-sharded-fsdp-weights config.yaml",
        },
        "rlcli convert RUN --role actor --to-hf O",
    ),
    (
        "try the model",
        {"TRL": "trl chat --model_name_or_path M", "axolotl": "axolotl inference config.yaml"},
        "rlcli chat RUN; rlcli generate RUN --prompt TEXT",
    ),
    (
        "what is installed",
        {"TRL": "trl env"},
        "rlcli doctor",
    ),
]
"""(Purpose, framework → its command, ours)."""

METRICS = [
    ("reward/reward", "reward (GRPO), objective/scores (PPO)", "critic/score/mean", ""),
    (
        "actor/kl",
        "kl (GRPO), objective/kl (PPO)",
        "actor/reward_kl_penalty",
        "TRL's PPO adds it up over a response; here it is the mean per token",
    ),
    ("actor/kl_penalty", "", "actor/kl_loss", "where the penalty is in the loss"),
    ("actor/kl_coef", "", "actor/reward_kl_penalty_coeff", ""),
    ("actor/entropy", "entropy (GRPO), policy/entropy_avg (PPO)", "actor/entropy", ""),
    (
        "actor/approx_kl",
        "policy/approxkl_avg (PPO)",
        "actor/ppo_kl",
        "TRL reports half the mean square of the log-ratio, never below 0",
    ),
    (
        "actor/clip_fraction",
        "clip_ratio/region_mean (GRPO), policy/clipfrac_avg (PPO)",
        "actor/pg_clipfrac",
        "",
    ),
    ("actor/dual_clip_fraction", "", "actor/pg_clipfrac_lower", ""),
    ("actor/importance_ratio", "val/ratio (PPO)", "", ""),
    (
        "actor/sampler_gap",
        "sampling/sampling_logp_difference/mean (GRPO)",
        "",
        "where samples are of the current weights; of older ones it is `actor/policy_drift`",
    ),
    ("actor/equal_rewards_fraction", "frac_reward_zero_std (GRPO)", "", ""),
    ("actor/response_length", "completions/mean_length (GRPO)", "response_length/mean", ""),
    (
        "actor/no_eos_fraction",
        "completions/clipped_ratio (GRPO)",
        "response_length/clip_ratio",
        "verl counts responses of the maximum length, even those that end there",
    ),
    ("critic/explained_variance", "", "critic/vf_explained_var", ""),
    ("critic/value_clip_fraction", "val/clipfrac_avg (PPO)", "critic/vf_clipfrac", ""),
    ("critic/loss", "loss/value_avg (PPO)", "critic/vf_loss", ""),
    ("actor/accuracy", "rewards/accuracies (DPO)", "", ""),
    ("actor/margin", "rewards/margins (DPO)", "", ""),
    ("actor/chosen_logprob", "logps/chosen (DPO)", "", ""),
    ("actor/rejected_logprob", "logps/rejected (DPO)", "", ""),
    ("reward/accuracy", "accuracy (reward model)", "", ""),
    ("reward/margin", "margin (reward model)", "", ""),
]
"""(Ours, TRL's with its trainer, verl's, what differs)."""

HEAD = """\
# Coming from TRL, verl, OpenRLHF or axolotl

A recipe is one file for what these frameworks divide between a script, a configuration and a
launcher. `rlcli` recognises their keys: one that is written in a recipe or on the command line is
refused, and the error says what it is called here.

```
$ rlcli validate ppo_math algorithm.kl_ctrl.kl_coef=0.1
error[R42] command line: unknown key algorithm.kl_ctrl.kl_coef
  hint: "kl_ctrl.kl_coef" is called ppo.kl_ctl in rlcli
```

What is different, whatever the names:

- A batch is counted in prompts of a whole step, over all devices (`train.prompts_per_step`), not in
  sequences per device. `train.microbatches` is a number of parts, not a size; without it,
  `train.max_tokens_per_microbatch` decides.
- Arguments belong to an algorithm, which explains them: `rlcli show ppo_actor`, `rlcli show dpo`.
  An unknown key is an error, and so is a known one in the wrong place.
- A key that is the same here is not listed: `temperature`, `top_p`. Without its section it is
  refused too, and the error names the section (`generation.temperature`).
- `rlcli resume RUN` continues any run exactly; a recipe needs no key for that.
- Adapters (LoRA) and images are not supported.

This page is written by `tests/house/coming_from.py`, its keys from the tables behind the error
messages.
"""


def words_here() -> dict[str, str]:
    """Foreign word → its keys here: one of every recipe, or arguments of interfaces."""
    here = {word: [f"`{key}`"] for word, key in SYNONYMS.items()}
    for (argument, word), interfaces in sorted(_of_interfaces().items()):
        here.setdefault(word, []).append(f"`{argument}` of {', '.join(interfaces)}")
    return {word: "; ".join(keys) for word, keys in here.items()}


def _of_interfaces() -> dict[tuple[str, str], list[str]]:
    """(Argument, foreign word) → the interfaces that declare it."""
    declared: dict[tuple[str, str], list[str]] = {}
    for name in registry.names("interfaces"):
        synonyms: Mapping[str, str] = registry.signature("interfaces", name).constants.get(
            "SYNONYMS", {}
        )
        for argument, words in synonyms.items():
            for word in words.split():
                declared.setdefault((argument, word), []).append(name)
    return declared


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD, *_commands(), "", *_metrics(), "", *_keys()]) + "\n"


def _commands() -> list[str]:
    lines = ["## Commands", "", _row(["to", *WORDS, "here"]), _rule(len(WORDS) + 2)]
    for purpose, theirs, ours in COMMANDS:
        cells = [f"`{theirs[name]}`" if name in theirs else "" for name in WORDS]
        commands = "; ".join(f"`{command}`" for command in ours.split("; "))
        lines.append(_row([purpose, *cells, commands]))
    return lines


def _metrics() -> list[str]:
    lines = [
        "## Metrics",
        "",
        "`rlcli show metrics` says what each means; [metrics.md](metrics.md) how to read them.",
        "",
        _row(["here", "TRL", "verl", "what differs"]),
        _rule(4),
    ]
    for ours, trl, verl, difference in METRICS:
        trl = re.sub(r"(\S+) \(", r"`\1` (", trl)
        lines.append(_row([f"`{ours}`", trl, f"`{verl}`" if verl else "", difference]))
    return lines


def _keys() -> list[str]:
    """A table with a line for each key here, and one of the words of other frameworks."""
    by_key: dict[str, list[str]] = {}
    for word, keys in words_here().items():
        by_key.setdefault(keys, []).append(word)
    lines = ["## Keys", "", _row(["here", *WORDS, "elsewhere"]), _rule(len(WORDS) + 2)]
    owners = {name: set(words.split()) for name, words in WORDS.items()}
    for keys, words in sorted(by_key.items(), key=lambda entry: entry[0].strip("`")):
        cells = [_listed(word for word in words if word in owned) for owned in owners.values()]
        others = _listed(word for word in words if not any(word in o for o in owners.values()))
        lines.append(_row([keys, *cells, others]))
    return lines


def _listed(words) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return _row(["---"] * columns)


if __name__ == "__main__":
    PAGE.write_text(page())
