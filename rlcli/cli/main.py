"""The `rlcli` command: its verbs, its global options,
and the exit code and message of every failure."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rlcli import __version__
from rlcli.cli import output
from rlcli.cli.completion import ANSWER, answer
from rlcli.cli.mistakes import as_usage_error
from rlcli.cli.output import (
    OutputClosed,
    OutputFailed,
    flush,
    keep_stdout_for_results,
    open_closed_streams,
    print_error,
    print_json,
    print_talk,
    print_text,
    silence,
)
from rlcli.cli.supervision import WHOLE_PROCESS
from rlcli.cli.verbs import LazyVerbs, new_typer
from rlcli.cli.watched_fork import WATCHED, report_verdict, watch_fork
from rlcli.errors import (
    Errors,
    Problem,
    RecipeError,
    ResourceError,
    RlcliError,
    as_document,
    escape_control,
    log_printably,
    printable_traceback,
)
from rlcli.garbage import collect_rarely
from rlcli.launch import lifeline
from rlcli.observe.status_line import status_line

VERBS = {
    "Train": {
        "train": "Run a recipe",
        "resume": "Resume an interrupted run",
    },
    "Runs": {
        "status": "List runs: state, step, reward, machine",
        "logs": "Print what the processes of a run have written",
        "attach": "Follow a running run live",
        "watch": "Follow several runs live, a line for each",
        "stop": "Stop a run, with a checkpoint",
        "samples": "Show prompts, responses and rewards of a run",
        "compare": "Compare the results of runs, over their seeds",
        "plot": "Draw metrics of runs, in the terminal or as a picture",
        "report": "Write a page about runs, for a browser",
        "profile": "Show where the time of a step went",
        "track": "Send a run to TensorBoard, W&B, MLflow or Trackio",
    },
    "Recipes": {
        "validate": "Check a recipe and report every problem",
        "check": "Check data, masks, lengths and rewards before training",
        "tokens": "Show which tokens of a row are trained on",
        "plan": "Show devices, execution order, batch sizes and memory",
        "show": "Show a resolved recipe, a section or a component",
        "explain": "Show which layer set a value and what uses it",
        "diff": "Show what differs between two recipes or runs",
        "cp": "Create a recipe that extends another one",
        "migrate": "Rewrite recipes of an older format",
        "schema": "Print the JSON Schema of recipes, for editors",
    },
    "Components": {
        "ls": "List components and recipes, and where each is",
        "new": "Create a component, a recipe or a project",
        "test": "Run the conformance tests of a component or recipe",
    },
    "Models": {
        "eval": "Evaluate a model on held-out rows",
        "generate": "Generate responses to prompts",
        "chat": "Chat with a model",
        "ckpt": "List, verify, prune and show the checkpoints of a run",
        "convert": "Convert models to Hugging Face's format, and back",
        "push": "Upload a model of a run to the Hub, with a model card",
    },
    "System": {
        "doctor": "Check the installation and the machine",
        "completion": "Install shell completion",
    },
}
"""Group → verb → description. `rlcli/cli/<verb>.py` has a function with the verb's name (or a Typer
with several commands), and is imported when the verb is used."""

LASTING = (*VERBS["Train"], "track", "test", "convert", "push", "eval", "generate", "chat")
"""Verbs that may run for a long time, during which garbage is collected."""

QUIET = ("train", "resume", "validate")
"""Verbs with a `--quiet` of their own."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that accepts no more output."""

EXAMPLES = """\
rlcli trains language models by reinforcement learning, from recipes.

  rlcli train ppo_math                   teach a small model arithmetic on a CPU
  rlcli train sft --model M --data D     train your model on your rows
  rlcli train ppo_math ppo.kl_ctl=0.02   another value for a key of the recipe
  rlcli plan ppo_math                    devices, order, memory; starts nothing
  rlcli show ppo_actor                   a component's options
  rlcli ls                               every component and recipe

rlcli --help lists all verbs."""


class Verbs(LazyVerbs):
    table = VERBS


app = new_typer(
    name="rlcli", cls=Verbs, help="Train language models by reinforcement learning, from recipes."
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", "-v", help="Show the traceback of an error.")
    ] = False,
    project: Annotated[
        Path | None,
        typer.Option("--project", metavar="DIR", help="Folder of your components and recipes."),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print_text(f"rlcli {__version__}")
        raise typer.Exit
    if project is not None:
        from rlcli.project import use_project

        use_project(project)
    if context.invoked_subcommand is None:
        print_text(EXAMPLES)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the code of the outcome."""
    open_closed_streams()
    log_printably()
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] != [ANSWER]:
        words = _in_order(words)
    if words[:1] != [ANSWER] and any(word in LASTING for word in words):
        collect_rarely()
    try:
        code = _run(words, is_whole_process=arguments is None)
        flush()
    except (BrokenPipeError, OutputClosed):
        # The reader has closed our output. Python would complain again when it flushes at exit.
        silence()
        code = 128 + 13
    except OutputFailed as error:
        silence(sys.stdout)
        code = _report(error, words)
    lifeline.report(verdict=code)
    report_verdict(code)
    sys.exit(code)


def _in_order(arguments: list[str]) -> list[str]:
    """The arguments with global options moved to where the parser expects them,
    and `help VERB` as `VERB --help`."""
    output.quiet = False
    verb = _verb(arguments)
    before: list[str] = []
    rest: list[str] = []
    last: list[str] = []
    literal: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            literal = [word, *words]
        elif word in ("--debug", "--verbose", "-v"):
            before.append("--debug")
        elif name == "--project":
            before += [word, *([] if equals else itertools.islice(words, 1))]
        elif name in ("--color", "--no-color"):
            is_off = name == "--no-color" or value == "never"
            os.environ["NO_COLOR" if is_off else "FORCE_COLOR"] = "1"
        elif word in ("--quiet", "-q"):
            output.quiet = verb not in QUIET
            last += [] if output.quiet else ["--quiet"]
        elif word == "--json" and verb:
            last.append(word)
        else:
            rest.append(word)
    if rest[:1] == ["help"]:
        rest = [*rest[1:], "--help"]
    return [*before, *rest, *last, *literal]


def _run(arguments: list[str], is_whole_process: bool) -> int:
    if arguments[:1] == [ANSWER]:
        with contextlib.suppress(Exception):  # nothing may disturb the line being typed
            answer(typer.main.get_command(app), arguments[1:])
        return 0
    try:
        return _call_verb(arguments, is_whole_process)
    except (BrokenPipeError, OutputClosed, OutputFailed):
        raise
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        if _verb(arguments) in VERBS["Train"]:
            print_talk("interrupted")
        return 130
    except SystemExit as error:
        # not raised by rlcli: a component or a library wants to exit, perhaps with 0
        from rlcli.registry.faults import fault

        return _report(fault(error), arguments)
    except Exception as error:
        return _failed(error, arguments)


def _call_verb(arguments: list[str], is_whole_process: bool) -> int:
    if is_whole_process and _verb(arguments) in WATCHED and sys.gettrace() is None:
        code = watch_fork()
        if code is not None:
            return code
        if "--json" in arguments:
            keep_stdout_for_results()
    settings = {WHOLE_PROCESS: is_whole_process}
    is_silent = output.quiet or "--json" in arguments
    with contextlib.nullcontext() if is_silent else status_line(print_talk):
        result = app(arguments, prog_name="rlcli", standalone_mode=False, obj=settings)
    return result if isinstance(result, int) else 0


def _failed(error: Exception, arguments: list[str]) -> int:
    """The exit code of a command that ended in an error, which is reported."""
    # Ctrl-C while Python 3.11 was creating a class
    if isinstance(error.__cause__, KeyboardInterrupt) and not isinstance(error, RlcliError):
        return 130
    reported = _reportable(error, arguments)
    if reported is not None:
        return _report(reported, arguments)
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
        raise OutputFailed(error) from error
    return _crash(error, _is_debugging(arguments))


def _reportable(error: Exception, arguments: list[str]) -> RlcliError | None:
    """An error as one of ours; None if it is a bug."""
    if isinstance(error, RlcliError):
        return error
    if hasattr(error, "format_message"):  # click's, of which typer brings its own copy
        return as_usage_error(error, arguments)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "rlcli").startswith("rlcli"):
        return ResourceError(
            f"{error.name} is not installed, and rlcli {_verb(arguments)} needs it".rstrip(),
            hint="reinstall rlcli with all that it requires; rlcli doctor lists what is missing",
        )
    if isinstance(error, FileNotFoundError) and not _is_anywhere():
        return ResourceError("the working directory was deleted", hint="cd to a folder that exists")
    return None


def _report(error: RlcliError, arguments: list[str]) -> int:
    """Print what went wrong: as text on stderr, with --json also on stdout."""
    if _is_debugging(arguments):
        _print_traceback(error)
    if "--json" in arguments and not isinstance(error, OutputFailed):
        print_json(as_document(error))
    print_error(error)
    if isinstance(error, RecipeError | Errors) and (line := _closing_line(error, arguments)):
        print_talk(line)
    return error.exit_code


def _closing_line(error: RecipeError | Errors, arguments: list[str]) -> str:
    """`2 problems; nothing was started. List the keys: rlcli show train`;
    empty if there is nothing to add."""
    count = len(error.problems)
    clauses = [f"{count} problems"] if count > 1 else []
    clauses += ["nothing was started"] if _verb(arguments) in VERBS["Train"] else []
    sentences = ["; ".join(clauses)] if clauses else []
    about = [problem.about for problem in error.problems if isinstance(problem, Problem)]
    sentences += [f"List the keys: rlcli show {name}" for name in list(filter(None, about))[:1]]
    return ". ".join(sentences)


def _verb(arguments: list[str]) -> str:
    every = [verb for verbs in VERBS.values() for verb in verbs]
    return next((argument for argument in arguments if argument in every), "")


def _is_debugging(arguments: list[str]) -> bool:
    verb = _verb(arguments)
    return "--debug" in (arguments[: arguments.index(verb)] if verb else arguments)


def _is_anywhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _crash(error: Exception, debug: bool) -> int:
    """Report a bug in rlcli: the traceback goes to a file that only the user can read."""
    if debug:
        _print_traceback(error)
    try:
        hint = f"this is a bug in rlcli; a report is in {_write_report(error)}"
    except OSError:
        hint = "this is a bug in rlcli; --debug before the verb shows where"
    description = escape_control(
        f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    ).rstrip(": ")
    print_error(RlcliError(f"unexpected {description}", hint=hint))
    return 1


def _print_traceback(error: Exception) -> None:
    print(printable_traceback(error), file=sys.stderr)


def _write_report(error: Exception) -> str:
    import tempfile
    import traceback

    stamp = time.strftime("%Y%m%d-%H%M%S")
    handle, name = tempfile.mkstemp(prefix=f"rlcli-crash-{stamp}-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"rlcli {__version__}, Python {sys.version.split()[0]}, {sys.platform}\n\n")
        file.writelines(traceback.format_exception(error))
    return name
