"""`rlcli test`: the conformance tests of a component, or a smoke run of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli.arguments import AsJson
from rlcli.cli.checks import CheckPrinter, SilentPrinter
from rlcli.cli.output import print_json


def test(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="interface, backend, dataset, family, recipe, reward; or all."
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name; without one: all of that kind.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Arguments of the component, overrides of the recipe."
        ),
    ] = None,
    keyword: Annotated[
        str,
        typer.Option("-k", metavar="WORDS", help="Only checks whose names contain these words."),
    ] = "",
    exit_first: Annotated[
        bool, typer.Option("--exit-first", "-x", help="Stop at the first failure.")
    ] = False,
    check_seconds: Annotated[
        float,
        typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Time limit of one check."),
    ] = 120.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of each failure.")
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="Write the results as JUnit XML too."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run the conformance tests of a component and its own tests, on the CPU, with tiny models.

    Example: rlcli test dataset arithmetic
    """
    from rlcli.testing.results import exit_code
    from rlcli.testing.subjects import subjects

    chosen = subjects(kind, name, settings or ())
    printer = SilentPrinter() if as_json else CheckPrinter(traceback)
    with printer:
        from rlcli.testing.runner import Options, run_checks

        tested = run_checks(chosen, printer, Options(keyword, exit_first, junit, check_seconds))
    code = exit_code(tested)
    if as_json:
        print_json(
            {
                "ok": code == 0,
                "exit_code": code,
                "components": [component.as_json() for component in tested],
            }
        )
    else:
        printer.total(tested)
    return code
