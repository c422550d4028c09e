"""`rlcli check`: check a recipe on its own rows, before any model is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson, Overrides, RecipeName, With, load
from rlcli.cli.findings import print_findings
from rlcli.cli.output import print_json
from rlcli.project import search_paths_kept


@search_paths_kept()
def check(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, metavar="N", help="Rows of each dataset to check.")
    ] = 200,
    as_json: AsJson = False,
) -> int:
    """Check a recipe's rows and files: masks, templates, lengths, tokens, rewards, arguments.
    Loads no model.

    Example: rlcli check ppo_math --rows 50
    """
    from rlcli.inspect.checklist import preflight
    from rlcli.inspect.findings import exit_code

    resolved = load(recipe, overrides, with_)
    with doing("checking rows and files"):
        findings = list(preflight(resolved, rows))
    code = exit_code(findings)
    if as_json:
        described = [finding.as_json() for finding in findings]
        print_json({"ok": code == 0, "recipe": resolved.recipe.name, "findings": described})
    else:
        print_findings(findings)
    return code
