"""How many planted bugs `rlcli test` finds: `python tests/mutants/kill_rate.py [--kind K] [--of
NAME] [--set unseen] [--json]`.

Each mutant is a small change of a good component, listed in a YAML file next to this one. It is
made in a copy of the repository, of whose tests only those of single components come along, as
`rlcli test` runs them along; `--bare` leaves them out too, so that only the contract suites can
find it. A mutant counts as killed when a check fails; one that cannot even be imported does not
count. Every suite is first run on the unchanged copy, where it must pass. In the YAML, text of
several lines is written under `|2-`, so that its own indentation counts.

A mutant may let loose what a sandbox would have stopped. So each suite runs in a control group with
a limit of tasks where that is possible, and everywhere under a process that ends what the suite has
started once these are too many processes, and whatever is left when the suite ends.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = ("rlcli", "interfaces", "backends", "datasets", "recipes", "pyproject.toml")
KINDS = ("interfaces", "backends", "datasets", "environments", "families", "recipes")
SUITES = {"interfaces": "interface", "backends": "backend", "datasets": "dataset",
          "environments": "environment", "families": "family", "recipes": "recipe"}  # fmt: skip
HOMES = {"environments": "interfaces/environments", "families": "rlcli/checkpoint/families"}
"""Where components are that are not in a folder of the name of their kind."""
OWN_TESTS = (*(f"tests/{kind}" for kind in KINDS), "tests/ops", "tests/fakes")
"""With those of the mathematics that they share, and what tests import."""
LOADED_ONCE = ("torch", "torch.distributed", "transformers",
               "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
               "safetensors.torch", "tokenizers", "pytest", "pydantic", "rich.console", "rich.text",
               "typer", "yaml", "jinja2", "numpy")  # fmt: skip
"""Shared by all mutants, since each runs in a fork of this process;
rlcli itself must not be among them."""
AT_ONCE = 2
MOST_PROCESSES = 200
"""That a suite may have at once; those of our components have a few dozen."""
MOST_TASKS = 600
"""Likewise, with all threads: fork() fails at this limit of the control group,
however fast it is called."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
BY_SIGNAL = 128
"""Added to the number of a signal that ended a suite, for its exit code."""
LOOK_SECONDS = 0.02
"""Between two counts of them."""
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SECONDS = 600
CHECK_SECONDS = 180


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    kind: str
    """One of KINDS: which suite is to find it."""
    bug: str
    test: str
    """What follows `rlcli test`."""
    file: str
    old: str
    new: str
    further_edits: Sequence[Sequence[str]] = ()
    """Further old and new texts, where a bug takes several changes."""
    component: str = ""
    """The correct component of `unusual/` that the bug is planted in, as `file`, which the
    repository lacks; as a path below that folder."""
    survives: str = ""
    """Why no test can see it."""
    law: str = ""
    """The only check that finds it, in words."""
    source: str = ""
    """Where such a bug was reported, or the class of bugs that it belongs to."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `killed`, `survived`, `timed out`, or `invalid`,
    which does not count."""

    mutant: Mutant
    verdict: str
    by: str
    """The checks that found it, or what went wrong."""
    seconds: float


def mutants(kind: str | None = None, folder: Path = HERE) -> list[Mutant]:
    """Those of the YAML files: `interfaces.yaml` and `interfaces_training.yaml` are both of the
    kind interfaces."""
    listed = []
    for path in sorted(folder.glob("*.yaml")):
        of = path.stem.partition("_")[0]
        if kind is None or of == kind:
            listed += [
                Mutant(kind=of, **entry)
                for entry in yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER) or ()
            ]
    return listed


def unusual(kind: str | None = None) -> list[Mutant]:
    """The correct components of `unusual/`, as mutants that add a file: a kill is a false alarm."""
    return [
        Mutant(
            kind=path.parent.name,
            bug=path.stem.replace("_", " "),
            test=f"{SUITES[path.parent.name]} {path.stem}",
            file=f"{HOMES.get(path.parent.name, path.parent.name)}/{path.name}",
            old="",
            new=path.read_text(encoding="utf-8"),
        )
        for path in sorted((HERE / "unusual").glob("*/*.*"))
        if path.suffix in (".py", ".yaml") and kind in (None, path.parent.name)
    ]


def copy_repository(folder: Path, bare: bool = False) -> Path:
    """The repository without its caches, and with the tests of single components only; `bare`:
    without these too."""
    folder.mkdir(parents=True)
    for name in (*COPIED, *(name for name in OWN_TESTS if not bare and (ROOT / name).is_dir())):
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, folder / name)
    return folder


def plant(mutant: Mutant, copy: Path) -> None:
    """Make the change. Raises ValueError unless each old text stands there exactly once; one
    without an old text is a new file."""
    file = copy / mutant.file
    if mutant.component:
        shutil.copy(HERE / "unusual" / mutant.component, file)
    if not mutant.old:
        with file.open("x", encoding="utf-8") as added:
            added.write(mutant.new)
        return
    file.write_text(with_bug(mutant, file.read_text(encoding="utf-8")), encoding="utf-8")


def with_bug(mutant: Mutant, text: str) -> str:
    """The text of a file with the changes made in it. Raises ValueError like `plant`."""
    for old, new in [(mutant.old, mutant.new), *mutant.further_edits]:
        if text.count(old) != 1:
            raise ValueError(
                f"{mutant.file} holds the old text {text.count(old)} times: {old.strip()[:60]!r}"
            )
        if old == new:
            raise ValueError("it changes nothing")
        text = text.replace(old, new)
    return text


def spread(mutants: Sequence[Mutant], each: int) -> list[Mutant]:
    """`each` mutants of each kind, spread evenly over its list."""
    chosen = []
    for kind in dict.fromkeys(one.kind for one in mutants):
        of = [one for one in mutants if one.kind == kind and not one.survives]
        chosen += [of[number * len(of) // each] for number in range(min(each, len(of)))]
    return chosen


# -- in a fork -------------------------------------------------------------------------------------


def _process_tree() -> ModuleType:
    """The module of the checkout; importing it by its name would import rlcli."""
    spec = importlib.util.spec_from_file_location(
        "process_tree", ROOT / "interfaces/rewards/_process_tree.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limited_group(name: str) -> Path | None:
    """A new control group below that of this process, with a limit of MOST_TASKS;
    None where it cannot be made."""
    for line in (
        Path("/proc/self/cgroup").read_text().splitlines() if CONTROL_GROUPS.is_dir() else ()
    ):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):  # version 2 has one hierarchy, without a name
            continue
        group = CONTROL_GROUPS / controllers / path.lstrip("/") / name
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / "pids.max").is_file():
                (group / "pids.max").write_text(str(MOST_TASKS))
                return group
            group.rmdir()
    return None


def watch(suite: int) -> int:
    """Wait for a child of this process, which must adopt orphans. Returns its exit code.

    What it has started is ended when it has ended, or when there are more than MOST_PROCESSES at
    once.
    """
    tree, this_process = _process_tree(), os.getpid()
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == suite:
            tree.end_descendants_of(this_process)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else BY_SIGNAL - code
        if pid == 0:
            if len(tree.descendants_of(this_process)) > MOST_PROCESSES:
                tree.end_descendants_of(suite)
                tree.end_descendants_of(this_process, spared={suite})
            time.sleep(LOOK_SECONDS)


def _run_watched(test: str, copy: Path, out: Path, group: Path | None) -> None:
    """Run a suite in a child of this process, which ends with it."""
    code = 70
    try:
        _process_tree().adopt_orphans()
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        suite = os.fork()
        if suite == 0:
            _run_suite(test, copy, out)
        code = watch(suite)
    finally:
        os._exit(code)


def _run_suite(test: str, copy: Path, out: Path) -> None:
    """`rlcli test` in the copy, in this process, which ends with it."""
    with out.open("w") as file, Path(f"{out}.err").open("w") as errors:
        os.dup2(file.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    os.chdir(copy)
    os.environ["RLCLI_PROJECT"] = str(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.dont_write_bytecode = True
    sys.path[:] = [
        str(copy),
        *(entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, HERE)),
    ]
    code = 70
    try:
        from rlcli.cli.main import main

        options = ["--json", "--all-layouts", "--timeout", str(CHECK_SECONDS)]
        main(["test", *shlex.split(test), *options])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class _Running:
    mutant: Mutant
    pid: int
    out: Path
    began: float
    copy: Path
    group: Path | None
    """The control group of its processes."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def _start(mutant: Mutant, folder: Path, bare: bool) -> _Running:
    copy = folder / "copy"
    copy_repository(copy, bare)
    if mutant.file:
        plant(mutant, copy)
    out = folder / "out.json"
    group = limited_group(f"rlcli-mutant-{os.getpid()}-{folder.name}")
    pid = os.fork()
    if pid == 0:
        _run_watched(mutant.test, copy, out, group)
    return _Running(mutant, pid, out, time.monotonic(), copy, group)


def _finished(running: _Running) -> Outcome | None:
    pid, status = os.waitpid(running.pid, os.WNOHANG)
    if pid:
        remove_group(running.group)
        return _judged(running, os.waitstatus_to_exitcode(status))
    if running.seconds < SECONDS:
        return None
    _kill(running)
    return Outcome(running.mutant, "timed out", f"not done after {SECONDS} s", running.seconds)


def _kill(running: _Running) -> None:
    """The process and those that it has started."""
    _process_tree().end_descendants_of(running.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(running.pid, 0)
    remove_group(running.group)


def remove_group(group: Path | None) -> None:
    """Remove a control group once its last processes, which have been ended, are gone."""
    end = time.monotonic() + 5
    while group is not None and group.is_dir() and time.monotonic() < end:
        with contextlib.suppress(OSError):
            group.rmdir()
        time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def _ended(running: list[_Running]) -> Iterator[None]:
    """Nothing outlives the hunt, however it ends."""
    try:
        yield
    finally:
        for hunted in running:
            _kill(hunted)


def _judged(running: _Running, code: int) -> Outcome:
    """From the suite's JSON: which checks failed. A program that no sandbox stops may also kill the
    suite itself."""
    if code > BY_SIGNAL:
        how = f"the suite was killed by {signal.Signals(code - BY_SIGNAL).name}"
        return Outcome(running.mutant, "killed", how, running.seconds)
    errors = Path(f"{running.out}.err").read_text(errors="replace").strip()
    try:
        result = json.loads(running.out.read_text())
        failed = [
            check["check"]
            for component in result["components"]
            for check in component["checks"]
            if check["outcome"] == "failed"
        ]
    except (ValueError, KeyError):
        last = errors.splitlines()[-1] if errors else "no output"
        return Outcome(running.mutant, "invalid", f"exit code {code}: {last}", running.seconds)
    if code == 0:
        return Outcome(running.mutant, "survived", "", running.seconds)
    if code == 1 and failed:
        return Outcome(running.mutant, "killed", "; ".join(failed), running.seconds)
    return Outcome(running.mutant, "invalid", f"exit code {code}: {errors[-300:]}", running.seconds)


# -- all of them -----------------------------------------------------------------------------------


def hunt(chosen: Iterable[Mutant], at_once: int = AT_ONCE, bare: bool = False) -> Iterator[Outcome]:
    """Run the suite of each mutant, some at a time, and yield each outcome as it comes."""
    for name in LOADED_ONCE:
        importlib.import_module(name)
    if "rlcli" in sys.modules:
        raise RuntimeError("rlcli is loaded already, so its copies cannot be")
    waiting: list[Mutant] = list(chosen)
    running: list[_Running] = []
    number = 0
    with tempfile.TemporaryDirectory(prefix="rlcli-mutants-") as home, _ended(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                mutant, number = waiting.pop(0), number + 1
                try:
                    running.append(_start(mutant, Path(home, str(number)), bare))
                except (ValueError, OSError) as error:
                    yield Outcome(mutant, "invalid", str(error), 0.0)
            time.sleep(0.05)
            for suite in list(running):
                outcome = _finished(suite)
                if outcome is not None:
                    running.remove(suite)
                    shutil.rmtree(suite.out.parent, ignore_errors=True)
                    yield outcome


def unchanged(chosen: Iterable[Mutant]) -> list[Mutant]:
    """One mutant without a change for each suite that is used:
    a false alarm would count as a kill."""
    return [
        Mutant("none", "nothing changed", test, "", "", "")
        for test in dict.fromkeys(one.test for one in chosen)
    ]


def _line(outcome: Outcome) -> str:
    mutant = outcome.mutant
    first, *rest = re.split("; ", outcome.by)
    by = (
        first + (f" (+{len(rest)})" if rest else "")
        if outcome.verdict == "killed"
        else outcome.by or mutant.survives
    )
    return (
        f"{outcome.verdict:<10}{mutant.kind:<11}{mutant.bug[:44]:<46}{outcome.seconds:5.1f} s  {by}"
    )


def _as_json(outcome: Outcome) -> dict[str, object]:
    mutant = outcome.mutant
    description = {
        "kind": mutant.kind,
        "bug": mutant.bug,
        "test": mutant.test,
        "survives": mutant.survives or None,
    }
    return {
        **description,
        "verdict": outcome.verdict,
        "by": outcome.by,
        "seconds": round(outcome.seconds, 1),
    }


def _rates(outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for kind in [*dict.fromkeys(one.mutant.kind for one in outcomes), "all"]:
        of = [
            one for one in outcomes if kind in (one.mutant.kind, "all") and one.verdict != "invalid"
        ]
        killed = sum(one.verdict == "killed" for one in of)
        lines.append(
            f"{kind:<11}{killed:3} of {len(of):3} killed"
            + (f"  {killed / len(of):.0%}" if of else "")
        )
    return lines


def _listed(name: str, kind: str | None) -> list[Mutant]:
    if name == "unusual":
        return unusual(kind)
    return mutants(kind, HERE if name == "own" else HERE / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument(
        "--set",
        choices=("own", "unseen", "second", "third", "fourth", "fifth", "unusual"),
        default="own",
        help="unseen: bugs as issue trackers report them, written before the checks; second "
        "to fifth: such bugs, written later by others who had not seen the checks; unusual: "
        "correct components, where each kill is a false alarm",
    )
    parser.add_argument(
        "--of", action="append", metavar="NAME", help="of these components only, such as sft"
    )
    parser.add_argument(
        "--only",
        type=int,
        action="append",
        metavar="N",
        help="the Nth of those, from 1; repeatable",
    )
    parser.add_argument(
        "--each", type=int, metavar="N", help="N of every kind, spread over its list"
    )
    parser.add_argument(
        "--first", action="store_true", help="end a suite with the first check that fails"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the unchanged components first"
    )
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N")
    parser.add_argument(
        "--bare", action="store_true", help="without the tests of single components"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [
        one
        for one in _listed(options.set, options.kind)
        if not options.of or one.test.split()[1] in options.of
    ]
    if options.only:
        chosen = [chosen[number - 1] for number in options.only]
    if options.each:
        chosen = spread(chosen, options.each)
    if options.first:
        chosen = [replace(one, test=f"{one.test} --exit-first") for one in chosen]
    alarms, outcomes = [], []
    baseline = [] if options.no_baseline or options.set == "unusual" else unchanged(chosen)
    for outcome in hunt(baseline, options.at_once, options.bare):
        if outcome.verdict != "survived":
            alarms.append(outcome)
        print(
            (
                f"{'sound' if outcome.verdict == 'survived' else 'FALSE ALARM':<20}"
                f"{outcome.mutant.test:<46}"
                f"{outcome.seconds:5.1f} s  {outcome.by}"
            ),
            file=sys.stderr,
            flush=True,
        )
    for outcome in hunt(chosen, options.at_once, options.bare):
        outcomes.append(outcome)
        print(_line(outcome), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps([_as_json(one) for one in outcomes], indent=2))
    else:
        print("\n" + "\n".join(_rates(outcomes)))
    expected = "survived" if options.set == "unusual" else "killed"
    missed = [one for one in outcomes if one.verdict != expected and not one.mutant.survives]
    return 1 if alarms or missed else 0


if __name__ == "__main__":
    sys.exit(main())
