"""Runs of a sweep on this machine: one after another, or as many at once as its devices allow."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.headway import doing
from rlcli.api.run_folder import RESOLVED_RECIPE, SWEEP
from rlcli.errors import ResourceError, UsageError
from rlcli.files import known_object, make_folder, not_writable, private_file, replace_file
from rlcli.inspect.cores import available_cores
from rlcli.inspect.devices import VISIBLE, list_gpus, visible_names
from rlcli.launch.commands import place_of
from rlcli.launch.stopping import heeded
from rlcli.observe.results import runs_first
from rlcli.observe.run_overview import Overview, read_overview
from rlcli.processes import die_with_parent, own_command
from rlcli.project import VARIABLE, current_project
from rlcli.recipe.sweep import SweepRun

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe

LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Sweep:
    """The content of sweep.json."""

    recipe: str
    """As the user gave it, files by their absolute path."""
    layers: tuple[str, ...]
    overrides: tuple[str, ...]
    """Overrides that all runs share."""
    runs: tuple[SweepRun, ...]

    @classmethod
    def from_here(
        cls, recipe: str, layers: Sequence[str], overrides: Sequence[str], runs: Sequence[SweepRun]
    ) -> Sweep:
        """A sweep of what the user named in the working directory."""
        places = [place_of(name, Path.cwd()) for name in (recipe, *layers)]
        return cls(places[0], tuple(places[1:]), tuple(overrides), tuple(runs))

    def write(self, folder: Path) -> None:
        replace_file(folder / SWEEP, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Sweep | None:
        """Read the sweep of a folder; None if there is none that can be read."""
        recorded = known_object(folder / SWEEP)
        try:
            runs = tuple(
                SweepRun(str(run["name"]), _texts(run["settings"])) for run in recorded["runs"]
            )
            return cls(
                str(recorded["recipe"]),
                _texts(recorded["layers"]),
                _texts(recorded["overrides"]),
                runs,
            )
        except (KeyError, TypeError):
            return None


@dataclass
class Local:
    """A sweep that is running on this machine."""

    sweep: Sweep
    folder: Path
    slots: Sequence[Mapping[str, str]]
    """For each run that may be running at once: variables that give it its share of the machine."""
    say: Callable[[str], None]
    goes_first: bool = False
    """Whether the first run must finish before the others begin."""
    is_checked: bool = True
    """Whether each run checks rows and rewards before it trains."""
    exit_codes: dict[str, int] = field(default_factory=dict)
    """Run → exit code."""
    _busy: dict[int, tuple[SweepRun, subprocess.Popen[bytes]]] = field(default_factory=dict)
    """Slot → the run in it."""
    _stopped_by: int | None = None
    _is_starting: bool = False
    """Whether a run is being started that is not in its slot yet."""
    _unsent: deque[int] = field(default_factory=deque)
    """Stop signals that the runs in progress have not been sent yet."""

    def run(self) -> int:
        """Run everything that is not done yet. Returns the exit code: 0 if all are done, else that
        of the first run that is not."""
        waiting = [run for run in self.sweep.runs if not self._is_done(run)]
        done_before = last = self._steps()[0]
        with (
            self._forwarded_signals(),
            doing(f"training {len(waiting)} runs", unit="steps") as work,
        ):
            while (waiting and self._stopped_by is None) or self._busy:
                for slot in range(len(self.slots)):
                    if waiting and slot not in self._busy and self._may_start():
                        self._start(slot, waiting.pop(0))
                time.sleep(LOOK_SECONDS)
                self._collect()
                done, total = self._steps()
                work.expect(total - done_before)
                work.advance(done - last)
                last = done
        if self._stopped_by is not None:
            return 130 if self._stopped_by == signal.SIGINT else 75
        return next((code for code in self.exit_codes.values() if code), 0)

    def overviews(self) -> list[tuple[SweepRun, Overview | None]]:
        """The state of each run."""
        return [(run, read_overview(self.folder / run.name)) for run in self.sweep.runs]

    def _is_done(self, run: SweepRun) -> bool:
        overview = read_overview(self.folder / run.name)
        return overview is not None and overview.state == "done"

    def _may_start(self) -> bool:
        return self._stopped_by is None and not (
            self.goes_first and self._busy and not self.exit_codes
        )

    def _start(self, slot: int, run: SweepRun) -> None:
        log = private_file(self.folder / f"{run.name}.log", os.O_APPEND)
        self._is_starting = True
        try:
            process = subprocess.Popen(
                own_command(self._arguments(run)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # a terminal's keys are for us
                env={**os.environ, **_project(), **self.slots[slot]},
                process_group=0,
                preexec_fn=functools.partial(_end_with, os.getpid()),
            )
            self._busy[slot] = run, process
        finally:
            self._is_starting = False
            os.close(log)
        self._send_signals()

    def _arguments(self, run: SweepRun) -> list[str]:
        """The arguments that start the run, or resume it if it has begun."""
        folder = self.folder / run.name
        if (folder / RESOLVED_RECIPE).is_file():
            return ["resume", "--quiet", "--", str(folder)]
        layers = [word for layer in self.sweep.layers for word in ("--with", layer)]
        options = [
            "--quiet",
            *([] if self.is_checked else ["--no-check"]),
            "--run-dir",
            str(folder),
            *layers,
        ]
        return ["train", *options, "--", self.sweep.recipe, *self.sweep.overrides, *run.settings]

    def _collect(self) -> None:
        for slot, (run, process) in list(self._busy.items()):
            if process.poll() is not None:
                del self._busy[slot]
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                self.exit_codes[run.name] = code
                self.say(self._ended(run, code))

    def _ended(self, run: SweepRun, code: int) -> str:
        overview = read_overview(self.folder / run.name)
        how = (
            f"{overview.state} at step {overview.step}"
            if overview is not None
            else f"exit code {code}"
        )
        where = f"; see {self.folder / run.name}.log" if code else ""
        return f"{run.name}  {how}{where}"

    def _steps(self) -> tuple[int, int]:
        """Steps that are done, and those of all runs, as far as these have said how many."""
        overviews = [overview for _, overview in self.overviews() if overview is not None]
        planned = [overview.steps for overview in overviews if overview.steps is not None]
        mean = sum(planned) / len(planned) if planned else 0
        unsaid = len(self.sweep.runs) - len(planned)
        return sum(overview.step for overview in overviews), round(sum(planned) + unsaid * mean)

    @contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """Forward each stop signal to the runs in progress, and start no others."""

        def forward(number: int, frame: object) -> None:
            if self._stopped_by is None:
                self.say(
                    f"{signal.Signals(number).name}: the active runs finish their step and save"
                )
            self._stopped_by = number
            self._unsent.append(number)
            if not self._is_starting:
                self._send_signals()

        before = {number: signal.signal(number, forward) for number in heeded()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _send_signals(self) -> None:
        with suppress(IndexError):  # none is left: the handler of another may have sent them
            while True:
                number = self._unsent.popleft()
                for _, process in self._busy.values():
                    process.send_signal(number)


def checked_recipes(sweep: Sweep) -> list[Recipe]:
    """The recipe of each run, all of them checked before any run starts. Raises the RecipeError of
    the first that is not valid."""
    from rlcli.recipe.resolve import load_recipe
    from rlcli.recipe.warm_start import chain

    recipes = []
    for number, run in enumerate(sweep.runs):
        overrides = [*sweep.overrides, *run.settings]
        resolved = load_recipe(sweep.recipe, overrides, sweep.layers, fresh=number == 0)
        chain(resolved)
        recipes.append(resolved.recipe)
    return recipes


def open_sweep(folder: Path, sweep: Sweep) -> None:
    """Create the folder of a sweep, or reuse one with the same runs.
    Raises ResourceError, UsageError."""
    recorded = Sweep.read(folder)
    if recorded is not None and recorded != sweep:
        message = f"{folder} holds another sweep"
        raise UsageError(
            message,
            where="--run-dir",
            hint=f"{folder / SWEEP} says which; choose another folder",
        )
    try:
        if recorded is None and folder.is_dir() and any(folder.iterdir()):
            raise ResourceError(
                f"{folder} is not empty", where="--run-dir", hint="choose another", code="F72"
            )
        make_folder(folder.absolute())
        sweep.write(folder)
    except OSError as error:
        raise not_writable(folder, error, "choose another --run-dir") from None


def slots(recipes: Sequence[Recipe], at_once: int | None) -> list[dict[str, str]]:
    """One slot for each of these runs that may run at once: by the GPUs that the largest needs,
    else one. Raises UsageError for more."""
    from rlcli.topology import plan_topology

    plans = map(plan_topology, recipes)
    topology = max(
        plans, key=lambda plan: (plan.device != "cpu", plan.nodes * plan.devices_per_node)
    )
    needed = topology.nodes * topology.devices_per_node
    devices = _visible_devices() if topology.device != "cpu" else []
    if topology.device == "cpu" or (topology.device == "auto" and not devices):
        count = at_once or 1
        threads = str(max(1, available_cores() // count // needed))
        return [
            {} if count == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
        ] * count
    shares = [
        devices[start : start + needed] for start in range(0, len(devices) - needed + 1, needed)
    ]
    if at_once is not None and at_once > max(1, len(shares)):
        message = f"{at_once} runs at once need {at_once * needed} GPUs; there are {len(devices)}"
        raise UsageError(message, where="--at-once", hint=f"at most {max(1, len(shares))}")
    return [{VISIBLE: ",".join(share)} for share in shares[:at_once]] or [{}]


def first_goes_alone(resolved: Resolved, log_dir: str) -> bool:
    """Whether a recipe that it starts from has to be run first: once, and not by every run."""
    return bool(runs_first(resolved, log_dir))


def again(folder: Path, arguments: Sequence[str]) -> str:
    """The command that continues a sweep."""
    words = iter(arguments)
    retained = []
    for word in words:
        if word == "--run-dir":
            next(words, None)
        elif not word.startswith("--run-dir="):
            retained.append(word)
    return shlex.join(["rlcli", *retained, "--run-dir", str(folder)])


def _visible_devices() -> list[str]:
    names = visible_names()
    return [str(gpu.index) for gpu in list_gpus()] if names is None else names


def _project() -> dict[str, str]:
    project = current_project()
    return {VARIABLE: str(project)} if project is not None else {}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(text) for text in value)


def _end_with(parent: int) -> None:
    """Die with the parent. Runs in the child between fork and exec."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
