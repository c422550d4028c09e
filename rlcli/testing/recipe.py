"""What every recipe must satisfy: it is valid, it can be planned, it is minimal,
and its graph runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rlcli import registry
from rlcli.api.key_meaning import REWARDS, SOLVED
from rlcli.errors import ModelError, RecipeError
from rlcli.inspect.checklist import inspect_rows
from rlcli.inspect.doubtful import contradictions
from rlcli.observe.metrics import read_metrics
from rlcli.project import is_built_in
from rlcli.recipe.introspection.minimal import superfluous
from rlcli.recipe.parsing.finding import shown
from rlcli.recipe.resolve import Resolved, load_recipe
from rlcli.recipe.schema import Component, Recipe
from rlcli.testing.contract import Contract, Note, Violation, skip_unless
from rlcli.testing.saved_models import saved_weights
from rlcli.testing.smoke import STEPS, SmokeRun, run_two_steps, write_rows
from rlcli.topology.report import make_plan

LEFT_TO_THE_USER = re.compile(r"datasets\.([\w.-]+)\.args\.path is required")
"""What a recipe may leave open: where the data are. The dataset's example rows are used instead."""
MODEL_LEFT_TO_THE_USER = re.compile(r"models\.([\w-]+) has no weights: give one of.*")
SOME_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""Its sizes are known here; the checks run tiny models of its family."""
UNUSUAL = ("generation.temperature=1.25", "generation.stop_token_ids=[1,2]")
"""No recipe has them, so that a call that does not follow these settings is seen."""
PERPLEXITY = "ppl"
"""Metric of a step that learns given texts."""
ROUNDING = 1e-5
"""A smaller norm of gradients is what rounding leaves of 0."""
UNDECIDED = 1.0
"""Nats per token by which a fresh model may differ from a uniform distribution, on a few rows."""
HUB = "hf:"
"""How the path of a dataset on the Hub begins, which is out of reach of a test."""


class RecipeContract(Contract):
    """Checks of a recipe, by name or file."""

    kind = "recipe"
    overrides: ClassVar[Sequence[str]] = ()
    """`key.path=value`: what a user must provide, such as where the data are."""

    @pytest.fixture(scope="class")
    @classmethod
    def resolved(cls, tmp_path_factory: pytest.TempPathFactory) -> Resolved:
        """The recipe, with our rows where it leaves them to the user or takes them from the Hub."""
        try:
            return _resolved(cls.name, cls.overrides, tmp_path_factory.mktemp("rows"))
        except RecipeError:
            pytest.skip("it does not hold")

    @pytest.fixture(scope="class")
    @classmethod
    def attempt(
        cls, resolved: Resolved, tmp_path_factory: pytest.TempPathFactory
    ) -> SmokeRun | Exception:
        """Two steps of the recipe, scaled down; or why they failed."""
        try:
            return run_two_steps(resolved, tmp_path_factory.mktemp("smoke"))
        except Exception as error:
            return error

    @pytest.fixture
    def smoke(self, attempt: SmokeRun | Exception) -> SmokeRun:
        """The two steps, if they ran."""
        if isinstance(attempt, Exception):
            pytest.skip("it does not run")
        return attempt

    def test_validates(self, tmp_path: Path) -> None:
        """every key and value is valid"""
        try:
            _resolved(self.name, self.overrides, tmp_path)
        except RecipeError as error:
            first, rest = error.problems[0], len(error.problems) - 1
            others = f", and {rest} more problem{'s'[: rest > 1]}" if rest else ""
            raise Violation(first.what + others, first.hint or "", first.where or "") from error

    def test_plans(self, resolved: Resolved) -> None:
        """its roles fit on its devices; its warm starts are valid"""
        plan = make_plan(resolved)
        unused = set(resolved.recipe.models) - {
            role
            for rank in range(plan.topology.world_size)
            for role in plan.topology.roles_on(rank)
        }
        if unused:
            raise Violation(
                f"no rank holds {', '.join(sorted(unused))}", where=_where(resolved, "models")
            )

    def test_settings_fit_together(self, resolved: Resolved, tmp_path: Path) -> None:
        """its settings do not contradict each other, also at another temperature and stop token"""
        try:
            changed = _resolved(self.name, [*self.overrides, *UNUSUAL], tmp_path)
        except RecipeError:  # it leaves its users no choice
            changed = resolved
        for warning in (*contradictions(resolved), *contradictions(changed)):
            location, _, finding = warning.partition(": ")
            raise Violation(finding, where=location)

    def test_is_minimal(self, resolved: Resolved) -> None:
        """it repeats nothing that its parents or the defaults say"""
        own_layer = next(layer for layer in resolved.layers if layer.path == resolved.path)
        entries = superfluous(resolved, own_layer)
        if entries:
            keys = ", ".join(f"{entry.key} (line {entry.mark.line})" for entry in entries)
            raise Violation(
                f"the recipe is the same without {keys}",
                "leave it out",
                entries[0].mark.file_and_line,
            )

    def test_rows_fit(self, resolved: Resolved) -> None:
        """its own rows fit, and none that is held out is trained on"""
        names = [name for name, section in resolved.recipe.datasets.items() if _is_drawn(section)]
        skip_unless(names, "its rows come from the user or the Hub")
        try:
            findings = list(inspect_rows(resolved, names))
        except ModelError as error:
            pytest.skip(f"its tokenizer cannot be read here: {error.what}")
        for finding in findings:
            if finding.level in ("warn", "FAIL"):
                raise Violation(
                    f"{finding.about}: {finding.says}",
                    finding.fix or "",
                    _where(resolved, "datasets"),
                )

    def test_opening_lines(self, resolved: Resolved) -> None:
        """it opens with what it does and what it needs"""
        skip_unless(is_built_in(resolved.path), "your own recipe may open as you like")
        does, needs, *_ = [*resolved.path.read_text(encoding="utf-8").splitlines(), "", ""]
        if not (
            does.startswith("# ") and does.rstrip().endswith(".") and needs.startswith("# Needs: ")
        ):
            raise Violation(
                f"it opens with {does!r} and {needs!r}",
                "begin the file with `# What it does.` and `# Needs: what it takes`",
                f"{shown(resolved.path)}:1",
            )

    def test_two_steps_run(self, attempt: SmokeRun | Exception, record_property: Note) -> None:
        """two steps run, with tiny models and a few rows"""
        if isinstance(attempt, Exception):
            raise attempt
        if attempt.finished.exit_code or attempt.finished.steps_done != STEPS:
            raise Violation(f"it ended after step {attempt.finished.steps_done} of {STEPS}")
        if attempt.replaced:
            record_property(
                "note",
                f"not on this machine, so with bytes as tokens: {', '.join(attempt.replaced)}",
            )

    def test_numbers_are_finite(self, smoke: SmokeRun) -> None:
        """losses, gradients and rewards are finite"""
        records = read_metrics(smoke.finished.outcome.run_dir / "metrics.jsonl")
        wrong = {
            name for record in records for name, value in record.items() if _is_not_finite(value)
        }
        if wrong:
            raise Violation(
                f"not finite: {', '.join(sorted(wrong))}",
                "rlcli check RECIPE looks at its rows and rewards",
            )
        for role in smoke.recipe.trained_roles:
            norms = [record[name] for record in records if (name := f"{role}/grad_norm") in record]
            if not norms or norms[0] < ROUNDING:
                when = "in the first step" if any(norm > ROUNDING for norm in norms) else ""
                raise Violation(
                    f"no gradient reaches {role} {when}".rstrip(),
                    "its loss does not depend on its weights",
                )

    def test_rewards_matter(
        self, resolved: Resolved, smoke: SmokeRun, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """what is learned from rewards changes with them"""
        learners = _learners_from_rewards(smoke.recipe)
        skip_unless(learners, "learns from no rewards")
        exchanged = run_two_steps(resolved, tmp_path_factory.mktemp("exchanged"), True)
        for role in learners:
            usual, changed = (
                saved_weights(run.finished.outcome.models[role]) for run in (smoke, exchanged)
            )
            if all(torch.equal(weight, changed[name]) for name, weight in usual.items()):
                raise Violation(
                    f"{role} learns the same when responses exchange their rewards",
                    "compare several responses of a prompt, and leave some of them out or weigh "
                    "them by their rewards",
                    _where(resolved, "graph"),
                )

    def test_starts_undecided(self, resolved: Resolved, smoke: SmokeRun) -> None:
        """a model from scratch finds all tokens about equally likely at first"""
        first = read_metrics(smoke.finished.outcome.run_dir / "metrics.jsonl")[0]
        perplexities = {
            role: first[name]
            for role in smoke.own_models
            if (name := f"{role}/{PERPLEXITY}") in first
        }
        skip_unless(perplexities, "trains no small language model from scratch on given texts")
        for role, perplexity in perplexities.items():
            config = smoke.finished.outcome.models[role] / "config.json"
            vocabulary = json.loads(config.read_text())["vocab_size"]
            beyond = abs(math.log(perplexity / vocabulary))
            if beyond > UNDECIDED:
                raise Violation(
                    f"{role} starts with a perplexity of {perplexity:.0f} over {vocabulary} tokens",
                    "its random weights are too large: lower scratch.initializer_range",
                    _where(resolved, f"models.{role}.scratch"),
                )

    def test_models_are_saved(self, smoke: SmokeRun) -> None:
        """what it trains is saved in the form that transformers reads"""
        skip_unless(smoke.recipe.saved_roles, "saves no model")
        for role, folder in smoke.finished.outcome.models.items():
            config = folder / "config.json"
            if not config.is_file() or "model_type" not in json.loads(config.read_text()):
                raise Violation(
                    f"{role} has no config.json with its model_type",
                    "the interface's save() writes it",
                )
            if not list(folder.glob("*.safetensors")):
                raise Violation(
                    f"{role} has no weights", "the interface's save() writes model.safetensors"
                )


def _learners_from_rewards(recipe: Recipe) -> list[str]:
    """The saved roles that are trained on rewards, or on what other calls make of them."""
    learners: set[str] = set()
    from_rewards: set[str] = set()
    for call in [*recipe.graph.values()] * len(recipe.graph):  # in whatever order they are written
        if {REWARDS, SOLVED} & {*call.outputs} or from_rewards & {*call.inputs}:
            from_rewards |= {call.output_key_remap.get(key, key) for key in call.outputs}
            learners |= {call.model} if call.call == "train_step" else set()
    return [role for role in recipe.saved_roles if role in learners]


def _resolved(name: str, overrides: Sequence[str], folder: Path) -> Resolved:
    """The recipe, with our models and rows where it leaves them to the user or takes rows from the
    Hub. Raises RecipeError for any other problem."""
    roles = _left_open(MODEL_LEFT_TO_THE_USER, name, overrides)
    overrides = [*overrides, *(f"models.{role}.path={SOME_MODEL}" for role in roles)]
    datasets = _left_open(LEFT_TO_THE_USER, name, overrides) or _from_hub(name, overrides)
    files = {dataset: folder / f"{dataset}.jsonl" for dataset in datasets}
    for file in files.values():
        file.touch()
    paths = [f"datasets.{dataset}.args.path={file}" for dataset, file in files.items()]
    resolved = load_recipe(name, [*overrides, *paths])
    for dataset, file in files.items():
        write_rows(resolved.recipe.datasets[dataset], file)
    return resolved


def _left_open(problem: re.Pattern[str], name: str, overrides: Sequence[str]) -> list[str]:
    """The roles or datasets of the recipe that have this problem."""
    try:
        load_recipe(name, overrides)
    except RecipeError as error:
        matches = (problem.fullmatch(each.what) for each in error.problems)
        return [match[1] for match in matches if match]
    return []


def _from_hub(name: str, overrides: Sequence[str]) -> list[str]:
    datasets = load_recipe(name, overrides).recipe.datasets
    return [name for name in datasets if str(datasets[name].args.get("path")).startswith(HUB)]


def _is_drawn(section: Component) -> bool:
    """Whether a dataset makes its rows itself: it reads no files and is made of no others."""
    arguments = {
        argument.name for argument in registry.signature("datasets", section.type).arguments
    }
    return not arguments & {"path", "datasets"}


def _where(resolved: Resolved, key: str) -> str:
    return resolved.origin(key).file_and_line


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
