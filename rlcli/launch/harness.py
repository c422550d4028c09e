"""Tasks of lm-eval, answered by one of our engines."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError, UsageError, first_line

INSTALL = "pip install 'rlcli[lm-eval]'"


def run_tasks(source: str, tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    """lm-eval's report for a model's folder or Hub id: `results` by task. `tasks` are its names, or
    your own YAML files; at most `limit` examples of each.

    Raises ResourceError if lm-eval is not installed, UsageError for an unknown task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ResourceError("--tasks needs lm-eval, which is not installed", hint=INSTALL)
    requested = [_task(name) for name in tasks]
    try:
        return _results(source, requested, limit)
    except ImportError as error:  # it imports what a task needs on demand
        raise ResourceError(f"lm-eval is incomplete: {error}", hint=INSTALL) from error


def _results(source: str, tasks: list[str | dict[str, Any]], limit: int | None) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from rlcli.launch.answering import load_alone
    from rlcli.runtime.harness import EngineLM

    manager = TaskManager()
    available = set(manager.all_tasks)
    if unknown := [name for name in tasks if isinstance(name, str) and name not in available]:
        hint = "lm-eval ls tasks lists them; a file of your own ends in .yaml"
        raise UsageError(f"lm-eval has no task {unknown[0]!r}", where="--tasks", hint=hint)
    report: Any = simple_evaluate(
        EngineLM(load_alone(source)),
        tasks=tasks,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    return dict(report["results"])


def _task(name: str) -> str | dict[str, Any]:
    if not name.endswith((".yaml", ".yml")):
        return name
    import yaml

    try:
        description = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{name} cannot be read: {first_line(error)}", where="--tasks") from None
    if not isinstance(description, dict) or "task" not in description:
        raise UsageError(
            f"{name} describes no task of lm-eval",
            where="--tasks",
            hint="it is a mapping with `task:`",
        )
    return description
