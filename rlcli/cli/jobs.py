"""Output of the verbs about runs that become Slurm jobs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import UsageError

if TYPE_CHECKING:
    from rlcli.launch.slurm.submit import JobArray


def refuse_dry_run(dry_run: bool) -> None:
    """Raise UsageError for `--dry-run` where no job would be submitted."""
    if dry_run:
        hint = "rlcli plan shows what a run will do, rlcli check tries its data"
        raise UsageError("--dry-run needs launch=slurm", hint=hint)


def tell_script(batch: JobArray, as_json: bool) -> int:
    """Print what would be submitted."""
    script = batch.script()
    if as_json:
        runs = [str(run) for run in batch.runs]
        print_json(
            {
                "ok": True,
                "dry_run": True,
                "folder": str(batch.folder),
                "runs": runs,
                "script": script,
            }
        )
    else:
        print_text(script.rstrip("\n"))
        print_talk(
            f"nothing is submitted; the script needs {batch.folder}, which rlcli "
            "makes without --dry-run"
        )
    return 0


def tell_submitted(job_id: str, folder: Path, runs: Sequence[Path], as_json: bool) -> int:
    """Print what was submitted, and the commands to type next."""
    from rlcli.observe.terminal import short_path

    if as_json:
        print_json(
            {"ok": True, "job": job_id, "folder": str(folder), "runs": [str(run) for run in runs]}
        )
        return 0
    name = shlex.quote(str(short_path(folder)))
    subject = "job" if len(runs) == 1 else f"an array of {len(runs)} jobs,"
    print_text(f"submitted {subject} {job_id} -> {name}")
    if len(runs) == 1:
        print_text(f"  rlcli status {name}     whether it is queued, and how far it is")
        print_text(f"  rlcli logs -f {name}    what it writes")
        print_text(f"  rlcli attach {name}     a live view")
    else:
        print_text(f"  rlcli status --runs {name}    the state of its runs")
        print_text(f"  rlcli compare {name}    their results")
    return 0
