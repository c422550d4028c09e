"""The model card of a trained model, from the record of its run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcli.api.value_model import CRITIC
from rlcli.errors import escape_control
from rlcli.files import known_object
from rlcli.observe.metrics import read_metrics
from rlcli.observe.report import MetricRow, before_and_after
from rlcli.observe.run_comparison import Recorded, read_run, recorded_recipe
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.series import short
from rlcli.observe.trackers.redaction import Redactor
from rlcli.recipe.introspection.fields import yaml_word
from rlcli.recipe.named_files import HUB_ID
from rlcli.recipe.parsing.tree import dotted, is_default

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
TOLD = ("datasets", "models", "graph", "train", "generation", "seed")
"""Sections of the recipe whose settings are listed; those of machines and logs are left out."""


def model_card(run: Path, role: str, repository: str, model: Path, step: int | None = None) -> str:
    """The card of a role's model, in Markdown; `model` is its folder, `step` the last one that
    trained it, None for the run's last. Raises ResourceError F72, DataError F31."""
    from jinja2 import Environment, StrictUndefined

    recorded, recipe = read_run(run), recorded_recipe(run)
    last = recorded.results["steps"] if step is None else step
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        name=repository.partition("/")[2],
        repository=repository,
        role=role,
        **_use(model),
        recipe=recorded.name,
        steps=last,
        base=_base(recipe, role),
        datasets=list(_datasets(recipe)),
        algorithms=_algorithms(recipe),
        results=list(map(_result, before_and_after(_records(run, step)))),
        has_curve=(run / "curve.png").is_file(),
        command=recorded.command,
        continued=list(_continuations(run, step)),
        settings=list(_settings(recorded)),
        facts=recorded.facts,
    )


def _use(model: Path) -> dict[str, str]:
    """What a model is for, and the class of transformers that loads it."""
    names = known_object(model / "config.json").get("architectures")
    is_critic = isinstance(names, list) and any(str(name).endswith(CRITIC) for name in names)
    task = "token-classification" if is_critic else "text-generation"
    auto_class = "AutoModelForTokenClassification" if is_critic else "AutoModelForCausalLM"
    return {"task": task, "auto_class": auto_class}


def _result(row: MetricRow) -> tuple[str, str, str]:
    """Its name, and its value before and after training."""
    return row.label, "" if row.before is None else short(row.before), short(row.after)


def _records(run: Path, step: int | None) -> list[dict[str, Any]]:
    """The metrics of the steps up to this one; None: of all. Raises DataError F31."""
    file = RunDirectory.open(run).metrics
    records = read_metrics(file) if file.is_file() else []
    return [record for record in records if step is None or record["step"] <= step]


def _continuations(run: Path, step: int | None) -> Iterator[str]:
    """When a run was continued with other settings before this step, and which."""
    redactor = Redactor(os.environ)
    for done, changes in RunDirectory.open(run).changes_on_resume():
        if step is None or done < step:
            words = (_code(redactor.word(f"{key}={now}")) for key, now in changes.items())
            yield f"after step {done} with {', '.join(words)}"


def _base(recipe: dict[str, Any], role: str) -> str | None:
    """The Hub's name of the model that a role began with; None if it has none."""
    path = recipe.get("models", {}).get(role, {}).get("path")
    return path if isinstance(path, str) and _is_on_the_hub(path) else None


def _datasets(recipe: dict[str, Any]) -> Iterator[str]:
    """The Hub's names of the data sets that were read."""
    for dataset in recipe.get("datasets", {}).values():
        path = (dataset.get("args") or {}).get("path")
        name = str(path).removeprefix("hf:")
        if str(path).startswith("hf:") and HUB_ID.fullmatch(name):
            yield name


def _is_on_the_hub(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def _algorithms(recipe: dict[str, Any]) -> list[str]:
    """The interfaces that trained something."""
    calls = recipe.get("graph", {}).values()
    trained = (call["interface"]["type"] for call in calls if call["call"] == "train_step")
    return list(dict.fromkeys(trained))


def _settings(run: Recorded) -> Iterator[tuple[str, str]]:
    """Key and value of what a layer or the command line has set, safe in a table."""
    for path, value in run.settings.items():
        if path[0] in TOLD and not is_default(run.values.origin(path) or ""):
            yield dotted(path), _code(yaml_word(value))


def _code(text: str) -> str:
    """A text as code of Markdown, safe in a table."""
    return "`" + escape_control(text).replace("|", "\\|").replace("`", "'") + "`"
