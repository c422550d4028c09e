"""Names of ReaLHF and AReaL that have no counterpart here, and what takes their place (see
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
_DATASET = "a dataset and its arguments are `datasets.train: {type: NAME, args: {...}}` of a recipe"

INSTEAD = {
    "rlcli.api.config": {
        **dict.fromkeys(("Experiment", "ExperimentConfig", "ExperimentScheduling"), _EXPERIMENT),
        **dict.fromkeys(("register_experiment", "register_quickstart_exp"), _EXPERIMENT),
        **dict.fromkeys(("SFTConfig", "RWConfig", "DPOConfig", "PPOConfig"), _EXPERIMENT),
        **dict.fromkeys(("Model", "ModelBackend"), _ROLE),
        **dict.fromkeys(("PromptAnswerDatasetConfig", "PairedComparisonDatasetConfig"), _DATASET),
        "PromptOnlyDatasetConfig": _DATASET,
    },
    "rlcli.api.data": {
        "NamedArray": "SequenceSample holds a batch: packed tensors by key, with their lengths"
    },
}


def attributes_of(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`. It raises ProjectError for the names above,
    AttributeError for any other."""

    def missing(name: str) -> Any:
        if (instead := INSTEAD[module].get(name)) is not None:
            raise ProjectError(f"rlcli has no {name}", hint=instead)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
