"""Checks that checkpoints can be ranked by their metric, where the best ones are kept."""

from __future__ import annotations

from collections.abc import Iterable

from rlcli.api.key_meaning import MEANINGS, NOT_ENDED, PROMPT_MASK, REWARDS, SOLVED
from rlcli.api.metrics import RUN_METRICS, metric_for
from rlcli.recipe.components import declared
from rlcli.recipe.schema import Call, Recipe
from rlcli.recipe.validation.semantics.notes import Notes

EVALUATIONS = "eval/"
"""Prefix of the metrics that an evaluation reports."""
MEASURES = {
    REWARDS: ("reward",),
    SOLVED: ("accuracy", "pass@<k>", "majority@<n>"),
    PROMPT_MASK: ("response_length",),
    NOT_ENDED: ("no_eos_fraction",),
}
"""Key that a call writes → what an evaluation reports of it (`rlcli.observe.responses`)."""


def check_ranking(notes: Notes) -> None:
    fault = _fault(notes.recipe)
    if fault is None:
        return
    problem, hint = fault
    needs = [("train", "eval"), ("graph",), ("models",)]
    needs += [("checkpoint", key) for key in ("best_metric", "every_steps", "every_epochs")]
    notes.note("R71", f"checkpoint.keep_best {problem}", ("checkpoint", "keep_best"), hint, needs)


def _fault(recipe: Recipe) -> tuple[str, str] | None:
    """(what is wrong with the metric, hint); None if checkpoints have it."""
    metric = recipe.checkpoint.best_metric
    section, slash, name = metric.partition("/")
    sections = {name.partition("/")[0] for name in RUN_METRICS if not name.startswith("<")}
    is_in_section = slash and section in {*sections, *recipe.models, *recipe.graph}
    if not is_in_section and metric not in RUN_METRICS:
        example = _metric_of_training(recipe)
        return (
            f"uses {metric}, which no step reports",
            f"write it as in the run's metrics, for example {example}",
        )
    return _fault_of_evaluation(recipe, name) if metric.startswith(EVALUATIONS) else None


def _fault_of_evaluation(recipe: Recipe, name: str) -> tuple[str, str] | None:
    """The same for a metric of the evaluation; `name`: without `eval/`."""
    evaluation, metric = recipe.train.eval, f"{EVALUATIONS}{name}"
    if evaluation.dataset is None:
        example = _metric_of_training(recipe)
        return (
            f"uses {metric}, but nothing is evaluated",
            f"set train.eval.dataset, or a checkpoint.best_metric of training: {example}",
        )
    reported = evaluation_metrics(evaluation.graph.values())
    if reported is not None and "/" not in name and metric_for(name, reported) is None:
        listed = ", ".join(f"{EVALUATIONS}{each}" for each in reported)
        return (
            f"uses {metric}, which the evaluation does not report",
            f"set checkpoint.best_metric, and best_is=lowest if less is better: {listed}",
        )
    every, settings = evaluation.every_steps, recipe.checkpoint
    if every == 1 or (every and (settings.every_steps or settings.every_epochs)):
        return None
    return (
        f"ranks checkpoints by {metric}, but only the last is of an evaluated step",
        f"set train.eval.every_steps={every or 'N'} checkpoint.every_steps={every or 'N'}",
    )


def _metric_of_training(recipe: Recipe) -> str:
    """A metric of every step, by which checkpoints can be ranked."""
    scoring = [call.model for call in recipe.graph.values() if REWARDS in call.outputs]
    return f"{scoring[0]}/reward" if scoring else f"{''.join(recipe.trained_roles[:1])}/loss"


def evaluation_metrics(calls: Iterable[Call]) -> list[str] | None:
    """The numbers that the calls of an evaluation report, without `eval/`, with `<…>` for what
    varies; None if an interface that evaluates does not declare its own."""
    names: dict[str, None] = {}
    for call in calls:
        declaration = declared("interfaces", call.interface.type, "METRICS")
        if call.call == "evaluate":
            if not isinstance(declaration, dict):
                return None
            names["loss"] = None
        for key in (call.output_key_remap.get(key, key) for key in call.outputs):
            names |= dict.fromkeys(MEASURES.get(key, () if key in MEANINGS else (key,)))
        names |= dict.fromkeys(declaration if isinstance(declaration, dict) else ())
    return [*names]
