"""Other frameworks' names for the keys of every recipe: ReaLHF, AReaL, verl, TRL, OpenRLHF,
NeMo-RL, torchtune, axolotl, LLaMA-Factory, unsloth. Names for interface arguments are declared by
the interfaces.

A word is the last part of the other framework's key, or its last parts where one is ambiguous:
`rollout.n`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

_WORDS: Mapping[str, str] = {
    "extends": "algorithm algo defaults",
    "cluster.device": "accelerator device_type trainer.device train_device",
    "cluster.nodes": "n_nodes nnodes num_nodes actor_num_nodes num_machines",
    "cluster.devices_per_node": (
        "n_gpus_per_node gpus_per_node num_gpus num_gpus_per_node actor_num_gpus_per_node "
        "nproc_per_node num_processes world_size devices"
    ),
    "launch": "launcher scheduler mode distributed_backend",
    "log.dir": (
        "output_dir fileroot default_local_dir logging_dir checkpoint_dir ckpt_path save_path "
        "log_dir save_dir run_dir"
    ),
    "log.trackers": (
        "report_to use_tensorboard tensorboard_enabled tensorboard metric_logger loggers "
        "trainer.logger wandb use_wandb wandb_enabled mlflow use_mlflow trackio use_trackio"
    ),
    "log.project": ("project_name wandb_project wandb_proj trackio_project mlflow_experiment_name"),
    "log.plot": "plot_loss",
    "log.samples_per_step": (
        "log_completions num_completions_to_print log_val_generations "
        "val_generations_to_log_to_wandb num_val_samples_to_print"
    ),
    "name": "experiment_name exp_name trial_name run_name wandb_run_name wandb_exp_name",
    "seed": "data_seed random_seed",
    "train.prompts_per_step": (
        "batch_size train_batch_size per_device_train_batch_size train_bs_n_seqs "
        "rollout_batch_size global_batch_size gbs train_global_batch_size num_prompts_per_step "
        "generation_batch_size gen_batch_size ppo_buffer_size"
    ),
    "train.microbatches": (
        "gradient_accumulation_steps n_mbs micro_batch_size micro_train_batch_size "
        "micro_rollout_batch_size train_micro_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "mbs forward_batch_size local_rollout_forward_batch_size"
    ),
    "train.max_tokens_per_microbatch": (
        "max_tokens_per_mb ppo_max_token_len_per_gpu max_token_len_per_gpu "
        "log_prob_max_token_len_per_gpu max_num_batched_tokens use_dynamic_bsz train_mb_tokens"
    ),
    "train.steps": (
        "max_steps num_train_steps total_steps total_training_steps max_steps_per_epoch "
        "max_num_steps total_train_steps benchmark_steps num_steps iterations"
    ),
    "train.epochs": (
        "num_epochs num_train_epochs total_epochs total_train_epochs num_episodes max_num_epochs "
        "n_epochs total_episodes"
    ),
    "train.shuffle": "shuffle_dataset dataloader_shuffle",
    "train.max_redraws": "max_num_gen_batches max_num_redraws",
    "train.prompts_per_draw": "gen_prompt_bsz",
    "train.max_staleness": (
        "offpolicyness max_head_offpolicyness max_trajectory_age_steps staleness"
    ),
    "train.eval": "eval_strategy evaluation_strategy evaluator validation",
    "train.eval.dataset": (
        "valid_dataset eval_dataset test_datasets val_set_size val_size validation_dataset"
    ),
    "train.eval.every_steps": (
        "eval_steps test_freq eval_freq_steps val_period evals_per_epoch "
        "eval_every_steps evaluator.freq_steps"
    ),
    "train.eval.at_start": "eval_on_start val_before_train val_at_start",
    "train.eval.at_end": "val_at_end",
    "train.max_nonfinite_streak": "skip_nan max_nan_steps",
    "generation": (
        "gconfig gen sampling_params generation_kwargs generation_config sampling_parameters"
    ),
    "generation.responses_per_prompt": (
        "num_generations n_samples_per_prompt n_samples group_size rollout.n "
        "num_generations_per_prompt rloo_k num_return_sequences grpo_size samples_per_prompt "
        "best_of"
    ),
    "generation.max_new_tokens": (
        "max_completion_length max_response_length response_length max_tokens max_gen_len "
        "generate_max_len max_generated_tokens max_output_tokens max_completion_tokens"
    ),
    "generation.min_new_tokens": "min_tokens min_gen_len min_length",
    "generation.greedy": "do_sample",
    "generation.temperature": "rollout.temperature",
    "generation.top_k": "rollout.top_k",
    "generation.top_p": "rollout.top_p",
    "generation.stop_token_ids": "stop_token_id stop_token eos_token_id stop",
    "models.<role>.backend.args.kv_cache_tokens": "max_total_tokens kv_cache_config.max_tokens",
    "models.<role>.backend.args.share_prefixes": "use_prefix_grouper enable_tree_training",
    "generation.routing_replay": (
        "router_replay rollout_routing_replay enable_rollout_routing_replay "
        "use_rollout_routing_replay"
    ),
    "generation.max_concurrent_responses": (
        "max_num_seqs max_concurrent_rollouts max_running_requests"
    ),
    "models.<role>.path": (
        "model model_name model_name_or_path model_path pretrained pretrain base_model "
        "sft_model_path ref_model critic_pretrain model_config path_or_name "
        "pretrained_model_name_or_path model.path"
    ),
    "models.<role>.tokenizer": (
        "tokenizer_path tokenizer_name tokenizer_config tokenizer_name_or_path"
    ),
    "models.<role>.scratch": "init_from_scratch from_config",
    "models.<role>.backend": "strategy deepspeed fsdp_config optim optimizer train_backend engine",
    "models.<role>.rollout": "use_vllm vllm_config vllm_mode enable_vllm vllm rollout.name",
    "models.<role>.backend.args.lr": (
        "learning_rate lr actor_learning_rate critic_learning_rate peak_lr max_lr"
    ),
    "models.<role>.backend.args.weight_decay": "weight_decay wd l2",
    "models.<role>.backend.args.warmup_steps": (
        "warmup_steps num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_ratio "
        "lr_warmup_steps_ratio warmup_steps_proportion warmup_style warmup"
    ),
    "models.<role>.backend.args.schedule": "lr_scheduler lr_scheduler_type lr_decay_style",
    "models.<role>.backend.args.min_lr_ratio": "min_lr min_lr_rate cosine_min_lr_ratio",
    "models.<role>.backend.args.beta1": "adam_beta1",
    "models.<role>.backend.args.beta2": "adam_beta2",
    "models.<role>.backend.args.eps": "adam_epsilon adam_eps",
    "models.<role>.backend.args.max_grad_norm": (
        "gradient_clipping grad_clip max_norm clip_grad_norm gradient_clip_val clip_grad"
    ),
    "models.<role>.backend.args.dtype": (
        "bf16 fp16 torch_dtype precision mixed_precision param_dtype model_dtype"
    ),
    "models.<role>.backend.args.gradient_checkpointing": (
        "enable_gradient_checkpointing enable_activation_checkpointing activation_checkpointing "
        "use_gradient_checkpointing recompute"
    ),
    "models.<role>.backend.args.offload_activations": (
        "activation_offloading enable_activation_offload activation_offload cpu_offload_activations"
    ),
    "models.<role>.mesh": "allocation_mode parallel parallelism parallel_config n_parallelism",
    "models.<role>.mesh.tp": (
        "tensor_model_parallel_size tensor_parallel_size model_parallel_size tp_size "
        "vllm_tensor_parallel_size"
    ),
    "models.<role>.mesh.pp": "pipeline_model_parallel_size pipeline_parallel_size pp_size",
    "models.<role>.mesh.dp": "data_parallel_size dp_size fsdp_size",
    "models.<role>.mesh.cp": (
        "context_parallel_size ulysses_sequence_parallel_size ring_attn_size cp_size "
        "sequence_parallel_size"
    ),
    "models.<role>.mesh.ep": "expert_model_parallel_size expert_parallel_size ep_size",
    "datasets.<name>": "dataset train_dataset data prompt_data dataset_mixer",
    "datasets.<name>.args.path": (
        "dataset_name dataset_path train_path train_files train_file data_files dataset_dir "
        "val_files valid_path data_path train_data train_data_path val_data_path "
        "train_dataset.path valid_dataset.path dataset.path"
    ),
    "datasets.<name>.args.max_length": (
        "max_prompt_length max_prompt_len prompt_max_len max_seq_length max_seq_len max_seqlen "
        "max_length cutoff_len sequence_len max_len max_total_sequence_length "
        "max_input_seq_length prompt_length"
    ),
    "datasets.<name>.args.max_rows": "max_samples train_max_samples",
    "datasets.<name>.args.overlong": "truncation filter_overlong_prompts",
    "datasets.<name>.args.question_key": "prompt_key input_key dataset_text_field",
    "datasets.<name>.args.answer_key": "label_key output_key",
    "datasets.<name>.args.template": "chat_template prompt_template input_template",
    "checkpoint.save_dtype": "export_dtype save_precision output_dtype",
    "checkpoint.every_steps": (
        "save_steps save_freq save_freq_steps ckpt_freq_steps save_period "
        "saver.freq_steps recover.freq_steps checkpoint_every_n_steps "
        "save_every_n_steps saves_per_epoch save_interval"
    ),
    "checkpoint.every_epochs": (
        "save_every_epochs save_freq_epochs ckpt_freq_epochs save_strategy "
        "save_epochs saver.freq_epochs"
    ),
    "checkpoint.every_seconds": "save_freq_secs ckpt_freq_secs saver.freq_secs",
    "checkpoint.keep_last": (
        "save_total_limit max_ckpt_num max_actor_ckpt_to_keep "
        "max_critic_ckpt_to_keep max_ckpt_to_keep"
    ),
    "checkpoint.keep_best": "keep_top_k load_best_model_at_end save_best",
    "checkpoint.best_metric": "metric_for_best_model metric_name",
    "checkpoint.best_is": "greater_is_better higher_is_better",
    "checkpoint.asynchronous": "async_save use_async_save",
    "graph.<call>.interface": (
        "rewards reward_funcs reward_func reward_function custom_reward_function remote_rm_url rl "
        "finetuning_type stage rlhf_type"
    ),
    "graph.advantages.interface.type": "adv_estimator advantage_estimator advantage_type",
    "graph.<call>.interface.args.path": (
        "reward_model reward_model_path reward_pretrain reward_model_name_or_path "
        "reward_model.model.path"
    ),
}
"""rlcli key → foreign words. `<role>`, `<name>` and `<call>` stand for user-defined names."""

_ARGUMENTS = {key.rpartition(".")[2]: key for key in _WORDS if ".backend.args." in key}
_FOREIGN = {word: target for target, words in _WORDS.items() for word in words.split()}
SYNONYMS: Mapping[str, str] = {**_ARGUMENTS, **_FOREIGN}
"""Foreign word, or an argument of a backend without its section → rlcli key."""


_ABSENT_WORDS: Mapping[str, str] = {
    (
        "swanlab use_swanlab comet clearml"
    ): "rlcli mirrors runs to TensorBoard, W&B, MLflow and Trackio: log.trackers=[trackio]",
    (
        "lora qlora peft use_lora use_peft peft_config lora_r lora_rank lora_alpha lora_dropout "
        "lora_target_modules"
    ): "rlcli trains all weights and has no LoRA yet; "
    "models.<role>.backend.args.gradient_checkpointing=true saves memory",
    ("orpo"): "rlcli has no ORPO yet; rlcli train dpo learns from pairs of chosen and rejected",
    (
        "load_in_4bit load_in_8bit quantization quantize bnb_4bit fp8"
    ): "rlcli has no quantised training yet; "
    "models.<role>.backend.args.gradient_checkpointing=true saves memory",
    (
        "args.optimizer args.momentum"
    ): "this backend trains with AdamW alone; models.<role>.backend=fsdp has Muon",
}
ABSENT: Mapping[str, str] = {
    word: advice for words, advice in _ABSENT_WORDS.items() for word in words.split()
}
"""Foreign word → advice: rlcli has no such feature yet; this is the nearest thing that it has."""


def absent(word: str) -> str | None:
    """The advice about something that rlcli does not have yet; None for any other word."""
    advice = ABSENT.get(word.lower().replace("-", "_"))
    return advice and advice.replace("<role>", "actor")


VALUES = {
    "gpu": "cuda",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "torchrun": "local",
    "distributed": "local",
}
"""Another framework's word for a value → ours."""


def word_here(word: str, legal: Collection[str]) -> str | None:
    """The valid value that a foreign word stands for."""
    meant = VALUES.get(word.lower())
    return meant if meant in legal else None


def called_here(word: str, key: str) -> str:
    """The hint for another framework's word, which may use another unit."""
    is_size, is_count = "batch_size" in word or word == "mbs", key.endswith("batches")
    unit = ", the number of parts that a batch is divided into" if is_size and is_count else ""
    example = f": {key}={trackers_in(word)}" if key == "log.trackers" else ""
    return f'"{word}" is called {key} in rlcli{unit}{example}'


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def trackers_in(*words: str) -> str:
    """The value of `log.trackers` that another framework's key or option stands for, with its
    value; for one that names no tracker, an example."""
    named = [tracker for tracker in TRACKERS if any(tracker in word for word in words)]
    return f"[{','.join(named or ['wandb'])}]"


def translated(
    path: Iterable[str], words: Mapping[str, str] | None = None, roles: Collection[str] = ()
) -> str | None:
    """The rlcli key for another framework's key; None if unknown. `words`: names for arguments of
    the recipe's interfaces. A role in the foreign key, as in `actor_rollout_ref.ref.…`,
    is filled in."""
    parts = [word.lower().lstrip("+~") for word in path]
    names = {**SYNONYMS, **(words or {})}
    for size in range(min(len(parts), max(word.count(".") for word in names) + 1), 0, -1):
        target = names.get(".".join(parts[-size:]))
        if target is not None:
            return target.replace("<role>", _role(parts, roles) or _usual(roles))
    return None


def _usual(roles: Collection[str]) -> str:
    """The role to assume where none is named."""
    return "actor" if "actor" in roles else "<role>"


def _role(parts: list[str], roles: Collection[str]) -> str | None:
    for word in reversed(parts):
        if word in roles:
            return word
        if (first := re.split(r"[_\W]", word)[0]) in roles:
            return first
    return None
