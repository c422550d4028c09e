"""Steps of ours next to those of TRL and of transformers' `generate`: time, memory, and whether
both compute the same. Needs `trl`.

    python tests/bench/next_to_peers.py --model FOLDER [--only JOB] [--rounds 5]
                                        [--dtype float32|bfloat16] [--device cpu|cuda]
                                        [--times N] [--threads N] [--write] [--json]

Jobs: `grpo` (4 prompts × 8 responses of 18 to 32 tokens, with a reference) and `grpo_long` (the
same with prompts of more than twice their length), `ppo` (as `grpo`, with a critic and responses of
32 tokens), `branching` (16 trajectories of six turns, of whose tokens four fifths are copies, next
to our own step that computes each as a whole), `sft`, `dpo`, `decode` (one response of up to 128
tokens; 32 and 128 of up to 32, 8 to a prompt; next to vLLM too, if RLCLI_VLLM_PYTHON names a Python
that has it).

Each side is a process with one thread, and both take steps in turn. Times are processor seconds;
for `decode`, of a token of a response. With `--threads N` they are seconds on the wall, on a
machine that must be idle. The first step is not timed; its loss must agree (1e-3 of the larger one,
2e-2 in bfloat16), or, for `decode`, its greedy tokens in float32. Memory is the peak of the
process, in which both sides also hold the weights as they were at the start. Exit code 1 if the two
differ.

With `--device cuda` times are seconds until a GPU has computed everything, and memory is that of
its tensors. `--times N` gives steps of training N times as many rows.

`--write` puts the rows into the table of `docs/speed.md` for this device, and leaves its other rows
as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

BENCHES = Path(__file__).parent
PAGE = BENCHES.parents[1] / "docs/speed.md"
BEGINNING = "<!-- written by tests/bench/next_to_peers.py, {device} -->"
END = "<!-- up to here -->"
JOBS = {
    "grpo_long": "TRL",
    "grpo": "TRL",
    "ppo": "TRL",
    "branching": "each as a whole",
    "sft": "TRL",
    "dpo": "TRL",
    "decode_1": "HF generate",
    "decode_32": "HF generate",
    "decode_128": "HF generate",
    "decode_1_vllm": "vLLM",
    "decode_32_vllm": "vLLM",
    "decode_128_vllm": "vLLM",
}
"""Job → what ours is compared with."""
VLLM = "RLCLI_VLLM_PYTHON"
WITHIN = {"float32": 1e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Measuring:
    """How each side of a job is run."""

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    times: int = 1
    threads: int = 1
    rounds: int = 5


def command(job: str, side: str, how: Measuring) -> list[str]:
    script = str(BENCHES / "peer_sides.py")
    names = ("model", "dtype", "device", "times")
    options = [f"--{name}={getattr(how, name)}" for name in names]
    return [sys.executable, script, job, side, *options]


class Process:
    """One side of a job, which takes a step when asked."""

    def __init__(self, arguments: Sequence[str], threads: int):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by end()
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )

    def step(self) -> dict[str, Any]:
        """Its figures. Raises SystemExit if the process has failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it printed says more
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise SystemExit(f"{self._process.args}\n{self._errors.read()[-3000:]}")
        figures: dict[str, Any] = json.loads(line)
        return figures

    def end(self) -> None:
        self._process.communicate()
        self._errors.close()


@dataclass(frozen=True)
class Comparison:
    job: str
    how: Measuring
    peer: str
    ours: float
    """Seconds of a step, or of a token: the median over the rounds."""
    theirs: float
    ratio: float
    least: float
    most: float
    our_mib: float
    their_mib: float
    agrees: bool

    @property
    def title(self) -> str:
        has_rows = self.job != "branching" and not self.job.startswith("decode")
        rows = f", {self.how.times} times the rows" if has_rows and self.how.times > 1 else ""
        threads = f", {self.how.threads} threads" if self.how.threads > 1 else ""
        return f"{self.job}, {self.how.dtype}{rows}{threads}"

    def cells(self) -> list[str]:
        digits = ".4f" if self.job.startswith("decode") else ".2f"
        return [
            self.title,
            self.peer,
            f"{self.ours:{digits}}",
            f"{self.theirs:{digits}}",
            f"{self.ratio:.2f} ({self.least:.2f} to {self.most:.2f})",
            f"{self.our_mib:,.0f} and {self.their_mib:,.0f}",
            "yes" if self.agrees else "no",
        ]


def compare(job: str, how: Measuring) -> Comparison:
    sides = [Process(command(job, side, how), how.threads) for side in ("ours", "theirs")]
    try:
        rounds_of_both = [[side.step() for side in sides] for _ in range(1 + how.rounds)]
    finally:
        for side in sides:
            side.end()
    first, *timed = rounds_of_both
    ours, theirs = _seconds(timed, side=0), _seconds(timed, side=1)
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    ours_computed, theirs_computed = (figures["computed"] for figures in first)
    return Comparison(
        job,
        how,
        JOBS[job],
        statistics.median(ours),
        statistics.median(theirs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        *(figures["mib"] for figures in timed[-1]),
        agrees=agree(ours_computed, theirs_computed, how.dtype),
    )


def _seconds(rounds: Sequence[Sequence[dict[str, Any]]], side: int) -> list[float]:
    return [figures[side]["seconds"] for figures in rounds]


def agree(ours: Any, theirs: Any, dtype: str) -> bool:
    """Losses, or tokens: in bfloat16 the first of each response, where near ties are rare."""
    if isinstance(ours, list):
        count = 1 if dtype == "bfloat16" else None
        return [row[:count] for row in ours] == [row[:count] for row in theirs]
    return abs(ours - theirs) <= WITHIN[dtype] * max(abs(ours), abs(theirs))


HEADINGS = [
    "job",
    "next to",
    "ours, s",
    "theirs, s",
    "times as fast",
    "MiB at the peak",
    "computes the same",
]


def write(rows: Sequence[Comparison], how: Measuring, page: Path) -> None:
    """Replace these rows of the table, or add them to it. Raises ValueError without its marks."""
    beginning = BEGINNING.format(device=how.device)
    before, _, rest = page.read_text().partition(beginning)
    table, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} has no place for the table: {beginning} … {END}")
    lines = {cells[0]: _line(cells) for cells in (HEADINGS, ["---"] * len(HEADINGS))}
    lines |= {_first_cell(line): line for line in table.splitlines() if line.startswith("|")}
    lines |= {row.cells()[0]: _line(row.cells()) for row in rows}
    machine = f"{_machine(how.device)}, {how.rounds} rounds at the last writing."
    page.write_text("\n".join([before + beginning, *lines.values(), "", machine, END]) + after)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _first_cell(line: str) -> str:
    return line.split("|")[1].strip()


def _machine(device: str) -> str:
    if device == "cpu":
        return f"{_processor()}, shared machine"
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def chosen(only: str | None) -> list[str]:
    """The jobs that a name means: one, those of `decode`, or all; next to vLLM if it is there."""
    jobs = [job for job, peer in JOBS.items() if peer != "vLLM" or VLLM in os.environ]
    if only == "decode":
        return [job for job in jobs if job.startswith("decode_")]
    return jobs if only is None else [only]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--only", choices=[*JOBS, "decode"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=WITHIN, default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--times", type=int, default=1, help="as many rows of a training step")
    parser.add_argument("--threads", type=int, default=1, help="of each side, on an idle machine")
    parser.add_argument("--write", action="store_true", help="into docs/speed.md")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if JOBS.get(options.only) == "vLLM" and VLLM not in os.environ:
        parser.error(f"{options.only} needs a Python that has vLLM: name it by {VLLM}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    how = Measuring(**{field.name: getattr(options, field.name) for field in fields(Measuring)})
    rows = []
    for job in chosen(options.only):
        rows.append(compare(job, how))
        print(
            json.dumps(asdict(rows[-1])) if options.json else " | ".join(rows[-1].cells()),
            flush=True,
        )
    if options.write:
        write(rows, how, PAGE)
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
