"""Tasks of lm-eval, answered by one of our engines."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError, UsageError


def run_tasks(source: str, tasks: Sequence[str], limit: int | None, shots: int | None) -> dict[str, Any]:
    """What lm-eval reports of a model's folder or Hub id: `results` by task. `tasks` are its names, or YAML files of
    one's own; `limit` examples of each at most.

    Raises ResourceError where lm-eval is not installed, UsageError for a task that nobody knows.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ResourceError("--tasks needs lm-eval, which is not installed", hint="pip install 'rlcli[lm-eval]'")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from rlcli.launch.answering import load_alone
    from rlcli.runtime.harness import EngineLM

    manager = TaskManager()
    wanted = [_task(name) for name in tasks]
    known = set(manager.all_tasks)
    if unknown := [name for name in wanted if isinstance(name, str) and name not in known]:
        hint = "lm-eval ls tasks lists them; a file of your own ends in .yaml"
        raise UsageError(f"lm-eval has no task {unknown[0]!r}", where="--tasks", hint=hint)
    found: Any = simple_evaluate(
        EngineLM(load_alone(source)), tasks=wanted, limit=limit, num_fewshot=shots, task_manager=manager,
        log_samples=False, bootstrap_iters=1000,
    )  # fmt: skip
    return dict(found["results"])


def _task(name: str) -> str | dict[str, Any]:
    if not name.endswith((".yaml", ".yml")):
        return name
    from lm_eval.utils import load_yaml_config

    if not Path(name).is_file():
        raise UsageError(f"there is no file {name}", where="--tasks")
    return dict(load_yaml_config(yaml_path=name))
