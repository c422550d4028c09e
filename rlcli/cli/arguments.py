"""Arguments that several verbs share, and what they mean: recipes, runs, models, output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.api.headway import doing
from rlcli.errors import ResourceError, UsageError
from rlcli.observe.run_search import NoSuchRun, find_run, find_runs, folder_of_runs
from rlcli.observe.series import NAMES

if TYPE_CHECKING:
    from rlcli.api.config import GenerationHyperparameters
    from rlcli.launch.answering import Answerer
    from rlcli.launch.trained_model import TrainedModel
    from rlcli.observe.run_overview import Overview
    from rlcli.recipe.prompt_format import PromptFormat
    from rlcli.recipe.resolve import Resolved

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be written.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the report.")]

# -- recipes ---------------------------------------------------------------------------------------

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override recipe values.")
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="LAYER", help="Apply a profile or recipe file on top; repeatable."
    ),
]


def load(recipe: str, overrides: Sequence[str] | None, with_: Sequence[str] | None) -> Resolved:
    """The recipe, ready to run. Raises RecipeError with all problems."""
    from rlcli.recipe.resolve import load_recipe

    return load_recipe(recipe, overrides or (), with_ or ())


# -- runs ------------------------------------------------------------------------------------------

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder or name, or a recipe: its newest run.")
]
RunsFolder = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of all runs.")]


def runs_named(word: str, runs: Path) -> list[Path]:
    """The run that a word names, or all runs of a folder. Raises ResourceError F72."""
    several = folder_of_runs(word, runs)
    return sorted(find_runs(several)) if several is not None else [find_run(word, runs)]


def runs_and_metrics(
    words: Sequence[str], find: Callable[[str], Sequence[Path]]
) -> tuple[list[Path], list[str]]:
    """The folders that words name, each once, and the words after the first that name no folder, or
    a curve, as `reward` does even if there are runs of that recipe: metrics. Raises ResourceError
    F72."""
    folders: list[Path] = []
    metrics: list[str] = []
    for word in words:
        if folders and word in NAMES:
            metrics.append(word)
            continue
        try:
            folders += [folder for folder in find(word) if folder not in folders]
        except NoSuchRun:
            if not folders:
                raise
            metrics.append(word)
    return folders, metrics


def overview_of(name: str, runs: Path, is_running: bool = False) -> Overview:
    """The state of the named run; for a recipe, of its newest run or (`is_running`) of the one that
    is running. Raises ResourceError F72."""
    from rlcli.launch.run_jobs import with_jobs
    from rlcli.observe.run_overview import read_overview

    def is_under_way(folder: Path) -> bool:
        overview = read_overview(folder)
        return overview is not None and overview.is_under_way

    folder = find_run(name, runs, is_under_way if is_running else None)
    overview = read_overview(folder)
    if overview is None:
        raise ResourceError(
            f"{folder} is not the folder of a run", hint="rlcli status lists the runs", code="F72"
        )
    return with_jobs([overview])[0]


# -- models ----------------------------------------------------------------------------------------

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_RUN",
        help="A model's folder or Hub id, or an rlcli run or checkpoint.",
    ),
]
RoleName = Annotated[
    str | None,
    typer.Option("--role", metavar="ROLE", help="Which model of a run; default: its actor."),
]
StepNumber = Annotated[
    int | None,
    typer.Option("--step", metavar="N", help="Which checkpoint of a run; default: the newest."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", min=1, metavar="N", help="Maximum length of a response, in tokens."
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, metavar="T", help="0 is greedy.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        metavar="P",
        help="Probability mass to sample from.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed of the responses.")]


def sampling(
    max_new_tokens: int, temperature: float, top_p: float, samples: int = 1
) -> GenerationHyperparameters:
    """The generation settings that the options describe. Raises UsageError."""
    from rlcli.api.config import GenerationHyperparameters

    try:
        return GenerationHyperparameters(
            responses_per_prompt=samples,
            max_new_tokens=max_new_tokens,
            top_p=top_p,
            greedy=temperature == 0,
            temperature=temperature or 1.0,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


@contextmanager
def answering(
    model: str, role: str | None, step: int | None, seed: int
) -> Iterator[tuple[TrainedModel, Answerer]]:
    """The named model, and an answerer with it. Raises UsageError, ModelError, ResourceError."""
    from rlcli.launch.answering import Answerer
    from rlcli.launch.trained_model import trained_model

    with trained_model(model, role, step) as trained:
        with doing("loading the model"):
            answerer = Answerer(trained.source, seed=seed)
        yield trained, answerer


def prompt_format_of(trained: TrainedModel, system: str | None, raw: bool = False) -> PromptFormat:
    """How prompts are written: as in the recipe of the model's run, if it is from one, with another
    system prompt if given. Raises ResourceError F72, RecipeError."""
    from rlcli.observe.run_comparison import recorded_recipe
    from rlcli.recipe.prompt_format import PromptFormat, prompt_format
    from rlcli.recipe.schema import Recipe

    if raw:
        return PromptFormat(system=system, chat=False)
    if trained.run is None:
        return PromptFormat(system=system)
    of_run = prompt_format(Recipe.model_validate(recorded_recipe(trained.run)))
    return replace(of_run, system=system if system is not None else of_run.system)
