"""Tasks of lm-eval, for a model that transformers loads."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import ModelError, ResourceError, UsageError, first_line

INSTALL = "pip install 'rlcli[lm-eval]'"
TEXTS_AT_ONCE = 8
"""Texts that the model scores or continues together."""


def run_tasks(source: str, tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    """lm-eval's report for a model's folder or Hub id: `results` by task. `tasks` are its names, or
    your own YAML files; at most `limit` examples of each.

    Raises ResourceError if lm-eval is not installed, UsageError for an unknown task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ResourceError("--tasks needs lm-eval, which is not installed", hint=INSTALL)
    requested = [_task(name) for name in tasks]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some libraries log to standard output
            return _results(source, requested, limit)
    except ImportError as error:  # it imports what a task needs on demand
        raise ResourceError(f"lm-eval is incomplete: {error}", hint=INSTALL) from error


def _results(source: str, tasks: list[str | dict[str, Any]], limit: int | None) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    available = set(manager.all_tasks)
    if unknown := [name for name in tasks if isinstance(name, str) and name not in available]:
        hint = "lm-eval ls tasks lists them; a file of your own ends in .yaml"
        raise UsageError(f"lm-eval has no task {unknown[0]!r}", where="--tasks", hint=hint)
    report: Any = simple_evaluate(
        _model(source),
        tasks=tasks,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    return dict(report["results"])


def _model(source: str) -> Any:
    """lm-eval's class for models of transformers, with a model's folder or Hub id. No code of the
    model is run, and no pickle is read. Raises ModelError."""
    from lm_eval.models.huggingface import HFLM

    from rlcli.checkpoint.huggingface import load_tokenizer
    from rlcli.runtime.roles import pick_device

    tokenizer, device = load_tokenizer(source), str(pick_device("auto", 0))
    try:
        return HFLM(
            source,
            tokenizer=tokenizer,
            device=device,
            batch_size=TEXTS_AT_ONCE,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"transformers cannot load {source}: {first_line(error)}") from error


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
