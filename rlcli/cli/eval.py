"""`rlcli eval`: evaluate a model on held-out rows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson, ModelName, Overrides, RoleName, StepNumber
from rlcli.cli.output import print_json, print_table, print_text
from rlcli.errors import UsageError
from rlcli.observe.series import short

if TYPE_CHECKING:
    from rlcli.launch.trained_model import TrainedModel
    from rlcli.observe.responses import Moments
    from rlcli.recipe.schema import Recipe
    from rlcli.runtime.evaluation import Evaluated

NAMES = {
    "response_length": "response length, in tokens",
    "no_eos_fraction": "cut off before it ended",
}
"""Clearer names for some measures."""
LONGEST_TEXT = 400
ANOTHER_FILE = "give another --save FILE, in a folder that exists and that you may write to"


def eval(  # the verb's name
    model: ModelName,
    overrides: Overrides = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", metavar="ROWS", help="A file of rows, a dataset, or RECIPE[#DATASET]."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward", metavar="NAME", help="The interface, or .py file, that scores responses."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("-n", "--samples", min=1, metavar="N", help="Responses to each prompt.")
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", min=0.0, metavar="T", help="0 is greedy [0, or 1 with several]."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", min=1, metavar="N", help="Maximum length of a response, in tokens."
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, metavar="N", help="Only the first rows.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="NAMES", help="Tasks of lm-eval instead of rows."),
    ] = None,
    role: RoleName = None,
    step: StepNumber = None,
    show: Annotated[
        int,
        typer.Option("--show", min=0, metavar="N", help="Number of prompts to show responses for."),
    ] = 2,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Write all responses to a .jsonl file, or replace it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out rows: accuracy, pass@k, majority vote, lengths.

    Example: rlcli eval runs/ppo_math/20261121-120000 --dataset gsm8k/test.jsonl -n 8
    """
    from rlcli.launch.components import read_reward
    from rlcli.launch.evaluation import check_exam, exam_recipe, examine, find_exam
    from rlcli.launch.harness import run_tasks
    from rlcli.launch.trained_model import trained_model

    if tasks is not None:
        of_rows = {
            "KEY=VALUE": overrides,
            "--dataset": dataset,
            "--reward": reward,
            "--samples": samples > 1,
            "--temperature": temperature is not None,
            "--max-new-tokens": max_new_tokens,
            "--save": save,
        }
        _refuse_with_tasks([option for option, value in of_rows.items() if value])
        with trained_model(model, role, step) as trained:
            _print_tasks(trained, run_tasks(trained.source, tasks.split(","), rows), as_json)
        return
    settings = [*_sampling(samples, temperature), *(overrides or ())]
    if max_new_tokens is not None:
        settings.append(f"generation.max_new_tokens={max_new_tokens}")
    if save is not None:
        _check_savable(save, dataset)
    with ExitStack() as stack:
        trained = stack.enter_context(trained_model(model, role, step))
        exam = find_exam(dataset, trained.run)
        if reward is not None:
            exam = exam.with_reward(read_reward(reward))
        resolved = exam_recipe(trained.source, exam, settings)
        check_exam(resolved)
        prompts = 10**9 if save is not None else show
        with doing("starting"):
            evaluated = examine(resolved, rows, prompts)
    if save is not None:
        _save(evaluated, save)
    shown = evaluated.texts[: show * resolved.recipe.generation.responses_per_prompt]
    if as_json:
        _print_json(trained, resolved.recipe, evaluated, shown)
    else:
        _print(trained, resolved.recipe, evaluated, shown)


def _refuse_with_tasks(options: Sequence[str]) -> None:
    """Raises UsageError for options that are about rows, and about answers that lm-eval keeps."""
    if options:
        raise UsageError(
            f"{options[0]} has no effect on --tasks",
            hint="lm-eval's tasks say how they are asked and scored; leave one of them out",
        )


def _print_tasks(
    trained: TrainedModel, results: Mapping[str, Mapping[str, Any]], as_json: bool
) -> None:
    """Print lm-eval's results: `acc,none` is a metric and the filter applied before it."""
    read = {
        task: {
            name.removesuffix(",none"): {
                "value": value,
                "standard_error": _number(_error_of(name, numbers)),
            }
            for name, value in numbers.items()
            if isinstance(value, int | float) and "," in name and "_stderr," not in name
        }
        for task, numbers in results.items()
    }
    if as_json:
        print_json({"ok": True, "model": trained.described, "results": read})
        return
    print_text(f"model    {trained.described}\n")
    rows = [
        (task, name, _shown(estimate["value"]), _shown(estimate["standard_error"]))
        for task, metrics in read.items()
        for name, estimate in metrics.items()
    ]
    print_table(("task", "metric", "value", "standard error"), rows)


def _error_of(name: str, numbers: Mapping[str, Any]) -> float | None:
    """lm-eval's standard error of a metric, which is "N/A" if there is none."""
    error = numbers.get(name.replace(",", "_stderr,", 1))
    return error if isinstance(error, float) else None


def _sampling(samples: int, temperature: float | None) -> list[str]:
    """Overrides for sampling: a single response is greedy unless a temperature is given;
    several are sampled."""
    chosen = temperature if temperature is not None else float(samples > 1)
    drawn = [f"generation.temperature={chosen}"] if chosen else ["generation.greedy=true"]
    return [f"generation.responses_per_prompt={samples}", *drawn]


def _check_savable(file: Path, dataset: str | None) -> None:
    """Check, before anything is sampled, that the responses can be written to this file.
    Raises UsageError, ResourceError F75."""
    from rlcli.files import check_replaceable, not_writable

    try:
        rows = os.path.expanduser(dataset or "")
        if file.is_file() and os.path.isfile(rows) and file.samefile(rows):
            raise UsageError(
                f"--save would replace the rows of --dataset {dataset}",
                hint=ANOTHER_FILE,
            )
        check_replaceable(file)
    except OSError as error:
        raise not_writable(file, error, ANOTHER_FILE) from None


def _save(evaluated: Evaluated, file: Path) -> None:
    """Write the responses to a file. Raises ResourceError F75."""
    from rlcli.files import not_writable
    from rlcli.observe.samples import SampleRecord, write_samples

    samples = (SampleRecord(step=0, phase="eval", **text) for text in evaluated.texts)
    try:
        write_samples(file, samples)
    except OSError as error:
        raise not_writable(file, error, ANOTHER_FILE) from None


def _print_json(
    trained: TrainedModel, recipe: Recipe, evaluated: Evaluated, shown: Sequence[dict[str, Any]]
) -> None:
    results = {name: _as_document(moments) for name, moments in evaluated.scores.items()}
    print_json(
        {
            "ok": True,
            "model": trained.described,
            "dataset": recipe.datasets[str(recipe.train.eval.dataset)].model_dump(),
            "generation": recipe.generation.model_dump(mode="json"),
            "results": results,
            "samples": [{**text, "logprob": _number(text["logprob"])} for text in shown],
            "seconds": round(evaluated.seconds, 3),
        }
    )


def _as_document(moments: Moments) -> dict[str, float | None]:
    return {
        "mean": _number(moments.mean),
        "standard_error": _number(moments.standard_error),
        "prompts": moments.size if moments.has_spread else None,
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _print(
    trained: TrainedModel, recipe: Recipe, evaluated: Evaluated, shown: Sequence[dict[str, Any]]
) -> None:
    print_text(f"model    {trained.described}")
    print_text(f"rows     {_rows(recipe, evaluated)}")
    print_text()
    rows = []
    for name, score in _ordered(evaluated):
        rows.append((NAMES.get(name, name), _shown(score.mean), _shown(score.standard_error)))
    print_table(("", "mean", "standard error"), rows)
    group = recipe.generation.build().responses_per_prompt
    for first in range(0, len(shown), group):
        _print_responses(shown[first : first + group])


def _ordered(evaluated: Evaluated) -> list[tuple[str, Moments]]:
    """Measures in order of importance: the main results first, explanatory ones last."""
    kinds = ("accuracy", "pass@", "majority@", "reward")
    scores = evaluated.scores.items()

    def rank(score: tuple[str, Moments]) -> int:
        name = score[0]
        if "_" in name:
            return len(kinds)
        return next(
            (number for number, kind in enumerate(kinds) if name.startswith(kind)), len(kinds)
        )

    return sorted(scores, key=rank)


def _shown(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _rows(recipe: Recipe, evaluated: Evaluated) -> str:
    """`256 of arithmetic, 8 responses to each at temperature 1, up to 512 tokens`"""
    from rlcli.launch.playing import played_by

    generation = recipe.generation.build()
    scored = (moments.size for moments in evaluated.scores.values() if moments.has_spread)
    count = max(scored, default=0)
    dataset = recipe.datasets[str(recipe.train.eval.dataset)]
    source = dataset.args.get("path") or dataset.type
    group = generation.responses_per_prompt
    drawn = "greedy" if generation.greedy else f"at temperature {generation.temperature:g}"
    unit = "response" if played_by(recipe) is None else "episode"
    each = f"{group} {unit}s to each" if group > 1 else f"one {unit} to each"
    return f"{count} of {source}, {each}, {drawn}, up to {generation.max_new_tokens} tokens"


def _print_responses(texts: Sequence[dict[str, Any]]) -> None:
    """Print the responses to one prompt, episodes turn by turn."""
    from rlcli.observe.samples import SampleRecord

    first = texts[0]
    answer = f"  (answer: {first['answer']})" if first["answer"] is not None else ""
    print_text(f"\n{first['id']}{answer}")
    print_text("  " + _cut(first["prompt"].strip()).replace("\n", "\n  "))
    for text in texts:
        facts = [f"reward {short(text['reward'])}"] if text["reward"] is not None else []
        facts += ["cut off"] if text["finish"] == "length" else []
        which = f"response {text['number'] + 1}" if len(texts) > 1 else "response"
        print_text(f"  --- {which}{': ' if facts else ''}{', '.join(facts)}")
        for label, written in SampleRecord(step=0, **text).parts():
            begins = "" if label == "response" else f"{label}: "
            print_text("  " + _cut(f"{begins}{written.strip()}").replace("\n", "\n  "))


def _cut(text: str) -> str:
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} […] {text[-half:]}"
