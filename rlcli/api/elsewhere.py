"""Names and commands of ReaLHF and AReaL that have no counterpart here, and what replaces them (see
docs/from-realhf.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlcli.errors import ProjectError

_EXPERIMENT = (
    "an experiment is a recipe: `rlcli cp ppo_math mine.yaml` creates one, "
    "`rlcli train mine` runs it"
)
_ROLE = (
    "a model and its backend are `models.ROLE` of a recipe; a role without "
    "weights has `backend: null`"
)
_CALL = (
    "a call is `graph.CALL: {model: ROLE, call: train_step, interface: NAME}` of a recipe; "
    "`rlcli show graph` lists its keys"
)
_DATASET = "a dataset and its arguments are `datasets.train: {type: NAME, args: {...}}` of a recipe"

_CONFIGURATION = {
    **dict.fromkeys(("Experiment", "ExperimentConfig", "ExperimentScheduling"), _EXPERIMENT),
    **dict.fromkeys(("register_experiment", "register_quickstart_exp"), _EXPERIMENT),
    **dict.fromkeys(("SFTConfig", "RWConfig", "DPOConfig", "PPOConfig"), _EXPERIMENT),
    **dict.fromkeys(("PromptAnswerDatasetConfig", "PairedComparisonDatasetConfig"), _DATASET),
    **dict.fromkeys(("PromptOnlyDatasetConfig", "DatasetConfig"), _DATASET),
    **dict.fromkeys(("MFCDef", "ModelRPC"), _CALL),
}
_MODULES = {
    "rlcli.api.config": "DatasetAbstraction ModelBackendAbstraction ModelInterfaceAbstraction "
    "FinetuneSpec GenerationHyperparameters MicroBatchSpec",
    "rlcli.api.data": "DatasetUtility SequenceSample register_dataset",
    "rlcli.api.model": "Model ModelBackend ModelInterface PipelinableEngine make_backend "
    "make_interface register_backend register_interface",
}
"""Module → what is imported from it, and was imported from the package there."""

INSTEAD = {
    "rlcli": {
        **_CONFIGURATION,
        **{
            name: f"from {module} import {name}"
            for module, names in _MODULES.items()
            for name in names.split()
        },
    },
    "rlcli.api.config": {**_CONFIGURATION, **dict.fromkeys(("Model", "ModelBackend"), _ROLE)},
    "rlcli.api.data": {
        "NamedArray": "SequenceSample holds a batch: packed tensors by key, with their lengths"
    },
}

COMPONENTS = {
    ("interfaces", "ppo"): (
        "PPO is ppo_actor, ppo_critic and, for rewards and advantages, gae: choose the one that "
        "has the arguments you set"
    ),
}
"""(Kind, name there) → the components here, where one has become several."""


def attributes_of(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`. It raises ProjectError for the names above,
    AttributeError for any other."""

    def missing(name: str) -> Any:
        if (instead := INSTEAD[module].get(name)) is not None:
            raise ProjectError(f"rlcli has no {name}", hint=instead)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
