"""The `rlcli` command: its verbs, its global options, and the exit code and message of every failure."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from rlcli import __version__
from rlcli.cli.ls import ls
from rlcli.cli.output import OutputClosed
from rlcli.cli.plan import plan
from rlcli.cli.show import show
from rlcli.cli.train import train
from rlcli.cli.validate import validate
from rlcli.errors import RecipeError, RlcliError, UsageError, escape_control

EXAMPLES = """\
rlcli trains language models by reinforcement learning, from recipes.

  rlcli train ppo_math                     train, and watch it learn
  rlcli train ppo_math ppo.kl_ctl=0.02     the same with another value
  rlcli plan ppo_math                      who computes what, without starting anything
  rlcli show ppo_actor                     what a component can be told
  rlcli ls                                 every component and recipe

rlcli --help lists all verbs."""

app = typer.Typer(
    name="rlcli",
    help="Train language models by reinforcement learning, from recipes.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    project: Annotated[
        Path | None, typer.Option("--project", metavar="DIR", help="Folder of your components and recipes.")
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"rlcli {__version__}")
        raise typer.Exit
    if project is not None:
        from rlcli.project import use_project

        use_project(project)
    if context.invoked_subcommand is None:
        typer.echo(EXAMPLES)


_VERBS = {verb.__name__: verb for verb in (train, validate, plan, show, ls)}
for _verb in _VERBS.values():
    app.command()(_verb)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the code of the outcome."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(given)
        sys.stdout.flush()
    except (BrokenPipeError, OutputClosed):
        # Whoever read our output has enough of it. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + 13
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    before_verb = [a for a in arguments if a.startswith("-")]
    debug, as_json = "--debug" in before_verb, "--json" in before_verb
    try:
        result = app(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except RlcliError as error:
        return _report(error, debug, as_json)
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, OutputClosed):
        raise
    except Exception as error:
        if hasattr(error, "format_message"):  # click's, of which typer brings its own copy
            return _report(_as_usage_error(error), debug, as_json)
        return _crash(error, debug)


def _report(error: RlcliError, debug: bool, as_json: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if as_json:
        from rlcli.cli.output import print_json

        print_json({"ok": False, "exit_code": error.exit_code, "problems": _problems(error)})
    print(error, file=sys.stderr)
    return error.exit_code


def _problems(error: RlcliError) -> list[dict[str, Any]]:
    found = error.problems if isinstance(error, RecipeError) else (error,)
    return [{"code": one.code, "where": one.where, "what": one.what, "hint": one.hint} for one in found]


def _as_usage_error(error: Any) -> UsageError:
    """click's complaint in our shape."""
    verb = getattr(error, "ctx", None) and error.ctx.command.name
    command = f"rlcli {verb}" if verb in _VERBS else "rlcli"
    return UsageError(error.format_message().rstrip("."), hint=f"{command} --help")


def _crash(error: Exception, debug: bool) -> int:
    """A bug of ours: the traceback goes to a file that only the user can read."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    handle, name = tempfile.mkstemp(prefix=f"rlcli-crash-{stamp}-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"rlcli {__version__}, Python {sys.version.split()[0]}, {sys.platform}\n\n")
        file.writelines(traceback.format_exception(error))
    if debug:
        traceback.print_exception(error)
    what = escape_control(f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " "))
    print(
        RlcliError(f"unexpected {what}", hint=f"this is a bug in rlcli; a report is in {name}"),
        file=sys.stderr,
    )
    return 1
