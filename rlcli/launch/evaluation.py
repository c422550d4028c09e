"""Evaluates a model on held-out rows, outside of any run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.key_meaning import PROMPTS, REWARDS
from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.errors import DataError, UsageError
from rlcli.launch.components import Component, read_component
from rlcli.launch.playing import argument_for_scores, played_by, played_in
from rlcli.launch.working_folder import in_its_folder
from rlcli.observe.run_comparison import recorded_recipe
from rlcli.owned_folder import temporary_folder
from rlcli.project import check_run_not_planted
from rlcli.recipe.lengths import generation_of
from rlcli.recipe.named_files import for_any_folder
from rlcli.recipe.parsing.finding import ROWS
from rlcli.recipe.prompt_format import PromptFormat, prompt_format
from rlcli.recipe.schema import Recipe
from rlcli.spelling import nearest_name

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.runtime.evaluation import Evaluated

log = logging.getLogger(__name__)

LAYER = "base/scored"
HELD_OUT = "held_out"
LIMITS = ("max_new_tokens", "min_new_tokens", "stop_token_ids")
"""Settings of generation that `rlcli eval` takes from the recipe."""
LOOKED_AT = 64
"""Rows that are checked before a model is loaded."""


@dataclass(frozen=True)
class Exam:
    """The rows that a model is evaluated on, and the reward that judges it."""

    dataset: Component
    """Without a type: that of the layer."""
    reward: Component | None = None
    """None: the reward of the layer."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Maximum length and stop tokens of responses, from the recipe of the dataset."""
    player: Component | None = None
    """The interface that plays an episode for each row; None: each is answered once."""

    def with_reward(self, reward: Component) -> Exam:
        """The same, judged by this reward instead of the environment's, or the recipe's."""
        if self.player is None:
            return replace(self, reward=reward)
        unscored = self.player["args"] | {argument_for_scores(self.player): False}
        return replace(self, reward=reward, player=self.player | {"args": unscored})

    @property
    def is_scored_by_environment(self) -> bool:
        player = self.player
        return player is not None and bool(player["args"].get(argument_for_scores(player)))


def find_exam(named: str | None, run: Path | None) -> Exam:
    """What `--dataset` names: a file or folder of rows, a dataset, `{type: …, args: …}`, or
    `RECIPE`, with `#DATASET` if it is not the one that the recipe evaluates on. None: the exam of
    the run. Rows alone are asked and judged as in the run; a run whose policy plays episodes plays
    them with any rows.

    Raises UsageError, RecipeError; ProjectError if another user may have planted the run.
    """
    if named is None and run is None:
        raise UsageError(
            "no rows are named: --dataset is missing",
            hint="give a file of rows, a dataset or a recipe",
        )
    if named is None:
        assert run is not None
        check_run_not_planted(run, "eval")
        return _exam_of_run(run)
    exam = _named_exam(named)
    if run is None or exam.player is not None:
        return exam
    if exam.generation:  # a recipe's
        return replace(exam, player=played_in(run, "eval"))
    return _as_in_run(exam, run)


def _as_in_run(exam: Exam, run: Path) -> Exam:
    """The rows of an exam with what the run has around them: its reward, the limits of responses
    and, for a file, the format of its prompts."""
    check_run_not_planted(run, "eval")
    recorded = recorded_recipe(run)
    with in_its_folder(run, "eval", log.debug):
        recipe = for_any_folder(Recipe.model_validate(recorded))
    dataset = exam.dataset
    if "type" not in dataset:
        style = asdict(prompt_format(recipe))
        default = asdict(PromptFormat())
        differing = {name: value for name, value in style.items() if value != default[name]}
        dataset = dataset | {"args": dataset["args"] | differing}
    return Exam(dataset, _reward_of(recipe), _limits(recipe), played_by(recipe))


def _named_exam(named: str) -> Exam:
    if named.lstrip().startswith("{"):
        return Exam(read_component(named, "--dataset"))
    if Path(named).expanduser().is_file() and Path(named).suffix in (*ROWS, ".json"):
        return Exam({"args": {"path": named}})
    return _exam_by_name(named)


def exam_recipe(source: str, exam: Exam, overrides: Sequence[str]) -> Resolved:
    """The recipe of an exam. Raises RecipeError with all problems."""
    from rlcli.recipe.resolve import load_recipe

    values = {"models.actor.path": source, **_keys(f"datasets.{HELD_OUT}", exam.dataset)}
    values |= {f"generation.{key}": value for key, value in exam.generation.items()}
    values |= _keys("graph.reward_inf.interface", exam.reward) if exam.reward is not None else {}
    values |= _of_player(exam) if exam.player is not None else {}
    set_by_hand = {text.partition("=")[0] for text in overrides}
    ours = [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
        if key not in set_by_hand
    ]
    return load_recipe(LAYER, [*ours, *overrides])


def _of_player(exam: Exam) -> dict[str, Any]:
    """What differs where episodes are played, by an interface that samples as the layer says."""
    assert exam.player is not None
    args = exam.player["args"] | {"generation": "${generation}"}
    keys = _keys("graph.actor_gen.interface", exam.player | {"args": args})
    if exam.is_scored_by_environment:
        unused = ("graph.reward_inf", "train.eval.graph.eval_reward", "models.reward")
        keys |= dict.fromkeys(unused)
    return keys


def check_exam(resolved: Resolved) -> None:
    """Check what can be checked without loading the model: its files, the rows, and that these have
    what the reward needs. Raises RlcliError."""
    from rlcli.inspect.before_start import check_before_start
    from rlcli.inspect.reward_checks import scores_texts
    from rlcli.inspect.rows import open_dataset

    # an evaluation keeps nothing: its folder is a temporary one, not log.dir of the layer
    with temporary_folder("eval-") as folder:
        check_before_start(resolved, folder / "run", [])
    call = resolved.recipe.graph.get("reward_inf")
    if call is None or not scores_texts(call):
        return
    rows = open_dataset(resolved, HELD_OUT).sample(LOOKED_AT)
    without = [row for row in rows if row.metadata.get("answer") is None]
    if without:
        raise DataError(
            (
                f"{len(without)} of {len(rows)} checked rows have no answer, which "
                f"{call.interface.type} compares responses with; first, {without[0].id}"
            ),
            where=without[0].where,
            hint=(
                "take a dataset whose rows have answers, such as math_prompts, or another --reward"
            ),
            code="F31",
        )


def examine(resolved: Resolved, rows: int | None, shown: int) -> Evaluated:
    """Have the recipe's workers answer at most the first `rows` rows,
    and read the responses to the first `shown`."""
    from rlcli.launch.workers import workers
    from rlcli.runtime.evaluation import evaluate_alone
    from rlcli.topology import plan_topology

    topology = plan_topology(resolved.recipe)
    with (
        temporary_folder("eval-") as folder,
        workers(resolved.recipe, topology, folder) as running,
    ):
        return evaluate_alone(resolved.recipe, topology, running.transport, rows, shown)


def _keys(prefix: str, component: Component) -> dict[str, Any]:
    """One key for each argument, so that further ones can be set in addition."""
    arguments = component.get("args") or {}
    kind = {f"{prefix}.type": component["type"]} if "type" in component else {}
    return kind | {f"{prefix}.args.{key}": value for key, value in arguments.items()}


def _exam_by_name(named: str) -> Exam:
    from rlcli.recipe.parsing.finding import whole_recipe_names
    from rlcli.registry import names

    datasets, recipes = names("datasets"), whole_recipe_names()
    if named in datasets:
        return Exam({"type": named})
    recipe, _, dataset = named.partition("#")
    if recipe in recipes or Path(recipe).is_file() or Path(f"{recipe}.yaml").is_file():
        return _exam_of_recipe(recipe, dataset or None)
    if Path(named).expanduser().is_dir():
        return Exam({"args": {"path": named}})
    close = nearest_name(named, [*datasets, *recipes])
    hint = (
        f"did you mean {close}?"
        if close
        else "give a file of rows, a dataset (rlcli ls) or a recipe"
    )
    raise UsageError(
        f"no rows {named!r}: neither a file, nor a dataset, nor a recipe",
        where="--dataset",
        hint=hint,
    )


def _exam_of_run(run: Path) -> Exam:
    """What a run evaluates on, for any folder: its paths are those of the folder that it was
    started in."""
    from rlcli.recipe.resolve import load_recipe

    file = run / RESOLVED_RECIPE
    absolute = str(file.absolute())
    with in_its_folder(run, "eval", log.debug):
        recipe = for_any_folder(load_recipe(absolute).recipe)
    return _exam_of(recipe, str(file), None)


def _exam_of_recipe(named: str, dataset: str | None) -> Exam:
    from rlcli.recipe.resolve import load_recipe

    return _exam_of(load_recipe(named).recipe, named, dataset)


def _exam_of(recipe: Recipe, named: str, dataset: str | None) -> Exam:
    chosen = dataset or recipe.train.eval.dataset
    if chosen is None or chosen not in recipe.datasets:
        problem = f"has no dataset {chosen!r}" if chosen else "evaluates on no dataset"
        raise _no_rows(named, recipe, problem)
    if not _has_prompts(recipe, chosen):
        raise _no_rows(named, recipe, f"has no prompts to answer in its dataset {chosen}")
    rows = recipe.datasets[chosen].model_dump()
    return Exam(rows, _reward_of(recipe), _limits(recipe), played_by(recipe))


def _limits(recipe: Recipe) -> dict[str, Any]:
    """Limits of responses in a recipe's evaluation; in its training if it has no other."""
    calls = (*recipe.train.eval.graph.values(), *recipe.graph.values())
    samples = (generation_of(recipe, call) for call in calls if call.call == "generate")
    generation = next(samples, recipe.generation.model_dump())
    return {name: generation[name] for name in LIMITS}


def _has_prompts(recipe: Recipe, dataset: str) -> bool:
    """Whether rows are prompts alone, which a model can answer, or may be, as nothing says it."""
    from rlcli.recipe.components import dataset_keys

    keys = dataset_keys(recipe.datasets, dataset)
    return keys is None or PROMPTS in keys


def _no_rows(named: str, recipe: Recipe, problem: str) -> UsageError:
    """The error for a recipe that does not say which rows a model should answer."""
    answerable = [name for name in recipe.datasets if _has_prompts(recipe, name)]
    if answerable:
        name, *others = answerable
        hint = f"name one: --dataset {named}#{name}"
        hint += f"; the others are {', '.join(others)}" if others else ""
    else:
        hint = (
            "give rows with prompts and answers: --dataset FILE.jsonl, or a recipe that is "
            "evaluated on some, such as --dataset ppo_math"
        )
    return UsageError(f"recipe {recipe.name} {problem}", where="--dataset", hint=hint)


def _reward_of(recipe: Recipe) -> Component | None:
    """The reward by which a recipe judges responses, if it needs no model of its own."""
    for call in (*recipe.train.eval.graph.values(), *recipe.graph.values()):
        if REWARDS in call.outputs and not recipe.models[call.model].has_weights:
            return call.interface.model_dump()
    return None
