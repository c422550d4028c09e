"""What a wrong name probably meant: the nearest one, the same one elsewhere, another framework's word."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

LOOKALIKES = dict(zip("аеорсухіјѕԁӏһԛԝьΑΒΕΖΗΙΚΜΝΟΡΤΥΧοαι", "aeopcyxijsdlhqwbABEZHIKMNOPTYXoai", strict=True))
"""Cyrillic and Greek letters that look like Latin ones."""

_LR = "models.<role>.backend.args.lr"

SYNONYMS: Mapping[str, str] = {
    "accelerator": "cluster.device",
    "batch_size": "train.prompts_per_step",
    "per_device_train_batch_size": "train.prompts_per_step",
    "train_batch_size": "train.prompts_per_step",
    "train_bs_n_seqs": "train.prompts_per_step",
    "gradient_accumulation_steps": "train.microbatches",
    "n_mbs": "train.microbatches",
    "max_tokens_per_mb": "train.max_tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_microbatch",
    "max_steps": "train.steps",
    "num_train_steps": "train.steps",
    "total_steps": "train.steps",
    "total_training_steps": "train.steps",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "total_epochs": "train.epochs",
    "total_train_epochs": "train.epochs",
    "eval_steps": "train.eval.every_steps",
    "test_freq": "train.eval.every_steps",
    "offpolicyness": "train.max_staleness",
    "max_head_offpolicyness": "train.max_staleness",
    "num_generations": "generation.responses_per_prompt",
    "n_samples_per_prompt": "generation.responses_per_prompt",
    "n_samples": "generation.responses_per_prompt",
    "group_size": "generation.responses_per_prompt",
    "max_completion_length": "generation.max_new_tokens",
    "max_response_length": "generation.max_new_tokens",
    "response_length": "generation.max_new_tokens",
    "max_length": "generation.max_new_tokens",
    "max_tokens": "generation.max_new_tokens",
    "min_tokens": "generation.min_new_tokens",
    "do_sample": "generation.greedy",
    "model": "models.<role>.path",
    "model_name": "models.<role>.path",
    "model_name_or_path": "models.<role>.path",
    "model_path": "models.<role>.path",
    "pretrained": "models.<role>.path",
    "tokenizer_path": "models.<role>.tokenizer",
    "tokenizer_name": "models.<role>.tokenizer",
    "dataset": "datasets.train",
    "dataset_name": "datasets.train",
    "train_dataset": "datasets.train",
    "train_files": "datasets.train.args.path",
    "valid_dataset": "train.eval.dataset",
    "eval_dataset": "train.eval.dataset",
    "learning_rate": _LR,
    "lr": _LR,
    "weight_decay": "models.<role>.backend.args.weight_decay",
    "warmup_steps": "models.<role>.backend.args.warmup_steps",
    "tensor_model_parallel_size": "models.<role>.mesh.tp",
    "tensor_parallel_size": "models.<role>.mesh.tp",
    "pipeline_model_parallel_size": "models.<role>.mesh.pp",
    "data_parallel_size": "models.<role>.mesh.dp",
    "context_parallel_size": "models.<role>.mesh.cp",
    "n_nodes": "cluster.nodes",
    "nnodes": "cluster.nodes",
    "num_nodes": "cluster.nodes",
    "n_gpus_per_node": "cluster.devices_per_node",
    "gpus_per_node": "cluster.devices_per_node",
    "num_gpus": "cluster.devices_per_node",
    "launcher": "launch",
    "scheduler": "launch",
    "mode": "launch",
    "output_dir": "log.dir",
    "fileroot": "log.dir",
    "default_local_dir": "log.dir",
    "logging_dir": "log.dir",
    "report_to": "log.tensorboard",
    "experiment_name": "name",
    "run_name": "name",
    "kl_coef": "ppo.kl_ctl",
    "init_kl_coef": "ppo.kl_ctl",
    "kl_loss_coef": "ppo.kl_ctl",
    "beta": "ppo.kl_ctl",
    "clip_range": "ppo.eps_clip",
    "cliprange": "ppo.eps_clip",
    "clip_ratio": "ppo.eps_clip",
    "lam": "ppo.gae_lambda",
    "gamma": "ppo.discount",
    "ppo_n_minibatches": "ppo.minibatches",
    "num_mini_batches": "ppo.minibatches",
}
"""Other frameworks' words → the key that means it here."""


def close_to(word: str, names: Iterable[str]) -> str | None:
    """The nearest name, or None if nothing is near."""
    candidates = list(names)
    folded = {name.lower().replace("-", "_"): name for name in candidates}
    same = folded.get(word.lower().replace("-", "_"))
    if same is not None:
        return same
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return near[0] if near else None


def lookalike(word: str) -> tuple[str, str] | None:
    """(the word in Latin letters, the foreign characters as U+XXXX), or None if all letters are plain."""
    if word.isascii():
        return None
    latin = "".join(LOOKALIKES.get(c, c) for c in unicodedata.normalize("NFKC", word))
    foreign = ", ".join(f"U+{ord(c):04X}" for c in dict.fromkeys(word) if not c.isascii())
    return (latin, foreign) if latin.isascii() else None


def suggest_key(key: str, legal: Iterable[str], blocks: Iterable[str] = ()) -> tuple[str, str | None]:
    """(message id, hint) for an unknown key: R43 if it is at home elsewhere, else R42."""
    names = list(legal)
    if (latin := lookalike(key)) is not None:
        target = close_to(latin[0], names) or latin[0]
        return "R23", f"it looks like {target} but contains {latin[1]}"
    near = close_to(key, names)
    if near is not None and near.lower() == key.lower():
        return "R43", f"did you mean {near}?"
    elsewhere = _homes().get(key)
    if elsewhere and near is None:
        return "R43", f"did you mean {elsewhere[0]}?"
    synonym = SYNONYMS.get(key.lower())
    if synonym is not None and (synonym.split(".")[0] != "ppo" or "ppo" in blocks) and near is None:
        return "R42", f"known elsewhere as {key}; here it is {synonym}"
    if near is not None:
        return "R42", f"did you mean {near}?"
    if close_home := close_to(key, _homes()):
        return "R42", f"did you mean {_homes()[close_home][0]}?"
    return "R42", "legal here: " + ", ".join(names) if names else None


@cache
def _homes() -> dict[str, list[str]]:
    """Key → the places in the schema where it is legal."""
    from rlcli.recipe.schema import Recipe

    homes: dict[str, list[str]] = {}
    _walk(Recipe, (), homes)
    return homes


_PLACEHOLDERS = {"models": "<role>", "datasets": "<name>", "graph": "<call>"}


def _walk(model: type[BaseModel], path: tuple[str, ...], homes: dict[str, list[str]]) -> None:
    for name, field in model.model_fields.items():
        homes.setdefault(name, []).append(".".join((*path, name)))
        for inner in sections_in(field.annotation):
            many = (_PLACEHOLDERS[name],) if name in _PLACEHOLDERS else ()
            _walk(inner, (*path, name, *many), homes)


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models inside a type, such as Role in `dict[str, Role]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in sections_in(part)]
