"""Start, find and read runs from Python: the same runs, in the same folders, as those of the
commands."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.run_folder import is_run
from rlcli.errors import ModelError, ResourceError, UsageError
from rlcli.files import known_object
from rlcli.launch.run_jobs import with_jobs
from rlcli.observe.run_overview import Overview, read_overview
from rlcli.observe.run_search import RUNS, find_run, find_runs
from rlcli.observe.series import short
from rlcli.observe.terminal import short_path
from rlcli.python.started import run_command

if TYPE_CHECKING:
    from rlcli.observe.samples import SampleRecord
    from rlcli.python.metrics import Metrics

Overrides = Mapping[str, Any] | Sequence[str] | str | None
"""`{"ppo.kl_ctl": 0.02}`, or `["ppo.kl_ctl=0.02"]` as on the command line; one text is one of
them."""
PathLike = str | os.PathLike[str]


def train(
    recipe: PathLike,
    overrides: Overrides = None,
    *,
    with_: PathLike | Sequence[PathLike] = (),
    run_dir: PathLike | None = None,
    check: bool = True,
    quiet: bool = False,
) -> Run:
    """Run a recipe, a name or a file, to its end, as `rlcli train` does; with launch=slurm, submit
    it. `with_`: a profile or file that is applied on top, or several; `check`: try some rows and
    rewards first; `quiet`: show warnings only.

    An interrupt (Ctrl-C, or that of a notebook) ends the run after its step, with a checkpoint, and
    raises KeyboardInterrupt; a second one ends it at once. Raises RecipeError with all problems of
    the recipe, and otherwise the RlcliError that the run ended with.
    """
    words = ["train", "--json"]
    words += [] if check else ["--no-check"]
    words += ["--run-dir", os.fspath(run_dir)] if run_dir is not None else []
    for layer in [with_] if isinstance(with_, str | os.PathLike) else with_:
        words += ["--with", os.fspath(layer)]
    return _run_to_end([*words, "--", os.fspath(recipe), *as_words(overrides)], quiet)


def run(name: PathLike, folder: PathLike = RUNS) -> Run:
    """The run of this folder or name, or the newest one of this recipe; `folder` holds all runs.
    Raises ResourceError F72 if there is none."""
    path = find_run(os.fspath(name), Path(folder))
    if not is_run(path):
        raise _not_a_run(path)
    return Run(path)


def runs(folder: PathLike = RUNS) -> list[Run]:
    """All runs in a folder, the most recently active first."""
    return [Run(path) for path in find_runs(Path(folder))]


@dataclass(frozen=True, repr=False)
class Run:
    """A run, read from its folder at every access; it may be in progress."""

    path: Path

    @property
    def state(self) -> str:
        """done, stopped, failed, died; starting, running, stopping; submitted, waiting, paused."""
        return self._overview.state

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self._overview.step

    @property
    def steps(self) -> int | None:
        """How many steps the run has; None if that is not known yet."""
        return self._overview.steps

    @property
    def message(self) -> str | None:
        """Why it failed, or what it waits for."""
        return self._overview.message

    @property
    def metrics(self) -> Metrics:
        """The metrics of its steps so far. Raises DataError F31 if the file is damaged."""
        from rlcli.observe.metrics import read_metrics
        from rlcli.python.metrics import Metrics

        file = self.path / "metrics.jsonl"
        return Metrics(read_metrics(file) if file.exists() else [])

    @property
    def samples(self) -> list[SampleRecord]:
        """The prompts, responses and rewards that it has recorded, in order. What a model wrote may
        contain anything. Raises DataError F31 if the file is damaged."""
        from rlcli.observe.samples import read_samples

        file = self.path / "samples.jsonl"
        return read_samples(file) if file.exists() else []

    @property
    def roles(self) -> list[str]:
        """The roles whose trained models it has saved."""
        return sorted(config.parent.name for config in self.path.glob("models/*/config.json"))

    def model(self, role: str = "actor", step: int | None = None, **options: Any) -> Any:
        """A trained model in transformers' own class, on the CPU unless `options`, which are those
        of `from_pretrained`, name a device. `step`: a checkpoint instead of the newest weights.
        Raises ModelError, UsageError."""
        from rlcli.api.model_class import model_class
        from rlcli.api.model_folder import model_folder
        from rlcli.launch.trained_model import trained_model

        with _quiet_loading(), trained_model(str(self.path), role, step) as trained:
            folder = model_folder(trained.source, weights=True)  # it may be a stranger's
            names = known_object(folder / "config.json").get("architectures")
            kind = model_class(names)
            if kind is None:
                raise ModelError(f"{trained.described}: transformers has no model {names!r}")
            return kind.from_pretrained(folder, **options)

    def tokenizer(self, role: str = "actor", step: int | None = None) -> Any:
        """The tokenizer of a trained model. Raises ModelError, UsageError."""
        from rlcli.checkpoint.huggingface import load_tokenizer
        from rlcli.launch.trained_model import trained_model

        with _quiet_loading(), trained_model(str(self.path), role, step) as trained:
            return load_tokenizer(trained.source)

    def resume(
        self, overrides: Overrides = None, *, accept_changes: bool = False, quiet: bool = False
    ) -> Run:
        """Continue from the last checkpoint, as `rlcli resume` does; see `train` for interrupts and
        errors. `accept_changes`: allow overrides that affect the rest of training."""
        words = ["resume", "--json", *(["--accept-changes"] if accept_changes else [])]
        return _run_to_end([*words, "--", str(self.path), *as_words(overrides)], quiet)

    def __repr__(self) -> str:
        cells = " ".join(f"{name} {value}" for name, value in self._described().items())
        return f"<run {short_path(self.path)}: {cells}>"

    def _repr_html_(self) -> str:
        """The same as a table, with the curves."""
        rows = {"run": short_path(self.path), **self._described()}
        cells = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table>{cells}</table>{self._curves()}"

    def _curves(self) -> str:
        try:
            picture = base64.b64encode((self.path / "curve.png").read_bytes()).decode()
        except OSError:
            return ""
        return f'<img alt="curves" width="700" src="data:image/png;base64,{picture}">'

    def _described(self) -> dict[str, Any]:
        overview = self._overview
        of = f"/{overview.steps}" if overview.steps else ""
        described: dict[str, Any] = {"state": overview.state, "step": f"{overview.step}{of}"}
        if overview.telling is not None:
            name, value = overview.telling
            described[name] = short(value)
        if overview.message:
            described["message"] = overview.message
        return described

    @property
    def _overview(self) -> Overview:
        overview = read_overview(self.path)
        if overview is None:
            raise _not_a_run(self.path)
        return with_jobs([overview])[0]


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Show no progress bars of transformers, and no advice on how they could look better."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        from transformers.utils import logging
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


def _not_a_run(folder: Path) -> ResourceError:
    hint = f"rlcli.runs({str(folder)!r}) lists those in it"
    return ResourceError(f"{folder} is not the folder of a run", hint=hint, code="F72")


def _run_to_end(words: Sequence[str], quiet: bool) -> Run:
    document = run_command(words, quiet)
    return Run(Path(document["run_dir"] if "run_dir" in document else document["folder"]))


def as_words(overrides: Overrides) -> list[str]:
    """Overrides as on the command line: values are JSON, which is YAML. Raises UsageError for a
    value that a recipe cannot have."""
    if isinstance(overrides, str):
        return [overrides]
    if not isinstance(overrides, Mapping):
        return list(overrides or ())
    return [f"{key}={_as_yaml(key, value)}" for key, value in overrides.items()]


def _as_yaml(key: str, value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "give numbers, texts, True, False, None, and lists and dictionaries of these"
        raise UsageError(str(error), where=key, hint=hint) from None


def _plain(value: Any) -> Any:
    """A path as its text, a number or an array of numpy as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a recipe has no values of type {type(value).__name__}")
