"""How long every verb that does not train takes, compared in one run; measures, tests nothing,
installs nothing.

    python tests/bench/start_up.py [--runs 10] [--run runs/sft_math/20260412-093011]
                                   [--peers /path/to/venv/bin]

Every command is run in turn, round after round, each time in an empty project, so that a busy
machine slows all of them alike. CPU time (user and system) is what the machine did; wall time also
holds what it waited for. Verbs that look at a run are measured where --run names one; peers that
are not installed are left out.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RLCLI = [sys.executable, "-m", "rlcli"]
OURS = (
    "--help",
    "--version",
    "ls",
    "validate sft_math",
    "validate ppo_math",
    "check sft_math",
    "check ppo_math",
    "tokens sft_math --row 17",
    "tokens ppo_math --row 17",
    "plan ppo_math",
    "plan ppo_math --with gpu8 --commands",
    "show ppo_math",
    "show ppo_actor",
    "explain ppo_math ppo.kl_ctl",
    "diff sft_math ppo_math",
    "cp ppo_math mine.yaml",
    "schema",
    "new dataset my-dataset",
    "doctor",
    "completion zsh",
    "__complete zsh tra",
    "__complete zsh train ppo_math models.actor.backend.args.",
)
OF_A_RUN = ("ckpt ls RUN", "ckpt show RUN", "ckpt verify RUN", "convert RUN --to-hf out --dry-run")
PEERS = ("trl", "accelerate", "oumi")
BASELINE = "rlcli --help"
LIMIT_S = 0.3
"""Limit of the median processor time, in seconds, of a verb that neither trains nor reads rows."""
CHECK_LIMIT_S = 0.6
"""That of `rlcli check`, which reads hundreds of rows and tries rewards on them."""
MAY_TAKE_LONGER = ("rlcli tokens", "rlcli doctor", "rlcli ckpt", "rlcli convert")
WIDTH = 62


def measure(command: list[str]) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of one run in an empty project; raises if the command fails."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled files
    if command[:3] == RLCLI:
        environment["PYTHONPATH"] = str(REPOSITORY)
    with tempfile.TemporaryDirectory() as project:
        (Path(project) / "pyproject.toml").write_text("[tool.rlcli]\n")
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            command, env=environment, cwd=project, check=True, capture_output=True, timeout=300
        )
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(run: Path | None, peers: Path | None) -> dict[str, list[str]]:
    """The commands to compare, with those of the peers that are installed."""
    selected = {f"rlcli {line}": [*RLCLI, *line.split()] for line in OURS}
    if run is not None:
        where = str(run.resolve())
        selected |= {
            f"rlcli {line}": [*RLCLI, *line.replace("RUN", where).split()] for line in OF_A_RUN
        }
    selected["python -c pass"] = [sys.executable, "-c", "pass"]
    for peer in PEERS:
        tool = shutil.which(peer, path=str(peers) if peers else None)
        if tool is not None:
            selected[f"{peer} --help"] = [tool, "--help"]
    return selected


def above(seconds: Mapping[str, float]) -> list[str]:
    """The commands that are too slow. `seconds`: name of a command → its median processor time."""
    ours = {name: median for name, median in seconds.items() if name.startswith("rlcli ")}
    limits = {
        name: CHECK_LIMIT_S if name.startswith("rlcli check") else LIMIT_S
        for name in ours
        if not name.startswith(MAY_TAKE_LONGER)
    }
    return [
        f"{name}: {ours[name]:.3f} s, {limit} allowed"
        for name, limit in limits.items()
        if ours[name] > limit
    ]


def main() -> int:
    """Measure and print the table. Returns 1 if a verb is too slow."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--runs", type=int, default=10, help="rounds, after one that warms the caches"
    )
    parser.add_argument(
        "--run", type=Path, help="a run with a checkpoint, for the verbs that look at one"
    )
    parser.add_argument(
        "--peers", type=Path, help="folder of the peers' commands; default: those on PATH"
    )
    options = parser.parse_args()
    compared = commands(options.run, options.peers)
    for name, command in dict(compared).items():
        try:
            measure(command)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            del compared[name]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
    for _ in range(options.runs):
        for name, command in compared.items():
            taken[name].append(measure(command))
    base = statistics.median(cpu for _, cpu in taken[BASELINE])
    title = f"seconds, of {options.runs} runs"
    print(f"{title:<{WIDTH}}{'wall min':>10}{'median':>8}{'CPU min':>10}{'median':>8}{'ratio':>8}")
    for name, pairs in taken.items():
        wall, cpu = [w for w, _ in pairs], [c for _, c in pairs]
        ratio = statistics.median(cpu) / base
        print(
            f"{name:<{WIDTH}}{min(wall):>10.3f}{statistics.median(wall):>8.3f}{min(cpu):>10.3f}"
            f"{statistics.median(cpu):>8.3f}{ratio:>8.1f}"
        )
    too_slow = above(
        {name: statistics.median(cpu for _, cpu in pairs) for name, pairs in taken.items()}
    )
    print("\n".join(too_slow), end="\n" if too_slow else "")
    return int(bool(too_slow))


if __name__ == "__main__":
    sys.exit(main())
