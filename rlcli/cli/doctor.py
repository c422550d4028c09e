"""`rlcli doctor`: what is installed, what is missing, and how to get it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson
from rlcli.cli.findings import finding_lines, print_findings, summary
from rlcli.cli.output import print_json, print_text

if TYPE_CHECKING:
    from rlcli.inspect.findings import Finding


def doctor(
    report: Annotated[
        bool, typer.Option("--report", help="Print a text to paste into an issue.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Check packages and the machine; report what is missing and how to get it.

    Example: rlcli doctor --report
    """
    from rlcli.inspect.doctor import examine, packages, variables

    with doing("checking the machine"):
        findings = list(examine())
    failed = any(finding.level == "FAIL" for finding in findings)
    if as_json:
        described = [finding.as_json() for finding in findings]
        print_json(
            {
                "ok": not failed,
                "findings": described,
                "packages": packages(),
                "variables_set": variables(),
            }
        )
    elif report:
        _print_report(findings, packages(), variables())
    else:
        print_findings(findings)
    return 1 if failed else 0


def _print_report(
    findings: Sequence[Finding], packages: dict[str, str | None], variables: Sequence[str]
) -> None:
    """Print a report without the home folder, host, user or values of environment variables."""
    import platform

    widest = max(len(finding.about) for finding in findings) + 2
    lines = [
        "rlcli doctor --report",
        (
            f"{platform.system()} {platform.release()}, {platform.machine()}, "
            f"{platform.python_implementation()}"
        ),
        "",
        *(line for finding in findings for line in finding_lines(finding, widest, 100)),
        summary(findings),
        "",
        "packages       "
        + ", ".join(f"{name} {version or '-'}" for name, version in packages.items()),
        "variables set  " + (", ".join(variables) or "none"),
    ]
    home = str(Path.home())
    for line in lines:
        print_text(line.replace(home, "~") if len(home) > 1 else line)
