"""`rlcli attach`: a live view of a run that is running elsewhere."""

from __future__ import annotations

import shlex

from rlcli.cli import output
from rlcli.cli.arguments import AsJson, RunName, RunsFolder, overview_of
from rlcli.cli.status import as_document
from rlcli.observe.run_search import RUNS, short_name

DIED = 7
"""Exit code for a run whose processes are gone."""


def attach(run: RunName, runs: RunsFolder = RUNS, as_json: AsJson = False) -> int:
    """Show a run live until it is over: progress, curves, pace and evaluations, all from its files.

    Ctrl-C leaves it running. The exit code is the run's; with --json how it ended is printed.

    Example: rlcli attach runs/ppo_math/20260412-093011
    """
    from rlcli.launch.run_jobs import Look
    from rlcli.observe.display import open_display
    from rlcli.observe.replay import FollowedRun, follow

    folder = overview_of(run, runs, is_running=True).folder
    name = short_name(folder, runs)
    try:
        with open_display(quiet=output.quiet) as display:
            ended = follow(FollowedRun(folder, Look()), display, name)
            display.finish()
    except KeyboardInterrupt:
        stop = f"rlcli stop {shlex.quote(short_name(folder))}"
        output.print_talk(f"detached; the run continues. Stop it: {stop}")
        return 130
    if as_json:
        output.print_json(as_document(ended))
    else:
        why = f": {ended.message}" if ended.message else ""
        output.print_text(f"{name} {ended.state} at step {ended.steps_done}{why}")
    return ended.exit_code if ended.exit_code is not None else DIED
