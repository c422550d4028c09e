"""How fast `rlcli convert` is compared with `cp`, and how much memory it takes compared with the
tools of torch.

    python tests/bench/convert.py [--model FOLDER …] [--random-gb 2] [--repeat 3] [--only-ours]

For every model: `cp` and fsync; `convert --to-hf` of what 4 ranks wrote, and of a complete folder;
the reverse, `--from-hf`; a change of type; and `dcp_to_torch_save` with `torch.load` and
`save_pretrained`, which is how a sharded checkpoint of torch becomes a folder that transformers
reads. Each is a separate process, one thread, on a warm page cache; times are the best of the
repeats, memory is the peak of the process. The exit code is 1 if a conversion takes more than its
limit of time, in proportion to `cp` and to what it writes, or of memory,
whatever the size of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIMES_CP, SECONDS_MORE = 4.0, 0.5
"""Limits of a conversion's seconds: a multiple of those of `cp` for as many bytes, and some in any
case. On two busy cores in 2026 it took 2 times as long, and 3 with a change of type."""
MIB_BEYOND_START = 64.0
"""Limit of what it takes in memory beyond a process that has imported the same and converts
nothing; 12 were seen."""
CP = "cp -r and fsync"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

CONVERT = """
import sys
from pathlib import Path
from rlcli.checkpoint.convert import convert, plan_from_hf, plan_to_hf
source, target, kind, dtype = sys.argv[1:]
plan, ranks = (plan_to_hf, {}) if kind == "to" else (plan_from_hf, {"ranks": 4})
convert(plan(Path(source), Path(target), dtype=dtype or None, **ranks), lambda count: None)
"""

NOTHING = "import numpy, rlcli.checkpoint.convert, safetensors"

COPY = """
import os, subprocess, sys
subprocess.run(["cp", "-r", "--reflink=never", *sys.argv[1:3]], check=True)
for folder, _, names in os.walk(sys.argv[2]):
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            os.fsync(file.fileno())
"""

MAKE_RANDOM = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
parameters = float(sys.argv[2]) * 1e9 / 2 - 2 * 32000 * 2048
layers = max(1, round(parameters / (4 * 2048**2 + 3 * 2048 * 5632)))
config = AutoConfig.for_model("llama", hidden_size=2048, intermediate_size=5632, vocab_size=32000,
                              num_hidden_layers=layers, num_attention_heads=32)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[1])
"""

MAKE_DCP = """
import sys, torch, torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
dcp.save(dict(model.named_parameters()), checkpoint_id=sys.argv[2], no_dist=True)
"""

TORCHS_WAY = """
import os, sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForCausalLM
checkpoint, described, target = sys.argv[1:]
dcp_to_torch_save(checkpoint, target + ".pt")
state = torch.load(target + ".pt", weights_only=True, mmap=True)
config = AutoConfig.from_pretrained(described)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
model.load_state_dict(state, strict=False, assign=True)
model.tie_weights()
model.save_pretrained(target)
os.remove(target + ".pt")
for name in os.listdir(target):
    with open(os.path.join(target, name), "rb") as file:
        os.fsync(file.fileno())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--model", type=Path, action="append", default=[], help="a folder that transformers reads"
    )
    options.add_argument(
        "--random-gb", type=float, default=2.0, help="size of a random model; 0 for none"
    )
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    options.add_argument("--only-ours", action="store_true", help="without the tools of torch")
    settings = options.parse_args(arguments)
    excesses = []
    with tempfile.TemporaryDirectory(dir=settings.folder) as temporary:
        models = [(folder.name, folder) for folder in settings.model]
        if settings.random_gb:
            random_model = Path(temporary) / f"random-{settings.random_gb:g}GB"
            _run(MAKE_RANDOM, random_model, settings.random_gb)
            models.append((random_model.name, random_model))
        for name, folder in models:
            conversions = _measure(
                name,
                folder,
                Path(temporary) / "work",
                settings.repeat,
                with_torch=not settings.only_ours,
            )
            excesses += [f"{name}: {excess}" for excess in above(conversions)]
    print("\n".join(excesses))
    return 1 if excesses else 0


@dataclass(frozen=True)
class Conversion:
    """What a conversion took."""

    job: str
    seconds: float
    """Without those that its process takes to start."""
    mib: float
    """Peak memory beyond that of a process that converts nothing."""
    cp_seconds: float
    """What `cp` takes for as many bytes as it writes."""


def above(conversions: Sequence[Conversion]) -> list[str]:
    """What is above its limit."""
    excesses = []
    for conversion in conversions:
        allowed = TIMES_CP * conversion.cp_seconds + SECONDS_MORE
        if conversion.seconds > allowed:
            excesses.append(
                f"{conversion.job} takes {conversion.seconds:.2f} s, {allowed:.2f} allowed"
            )
        if conversion.mib > MIB_BEYOND_START:
            excesses.append(
                f"{conversion.job} takes {conversion.mib:.0f} MiB, {MIB_BEYOND_START:.0f} allowed"
            )
    return excesses


def _measure(name: str, model: Path, work: Path, repeat: int, with_torch: bool) -> list[Conversion]:
    work.mkdir()
    _run(CONVERT, model, work / "ranks", "from", "")
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    largest = _largest(model)
    print(f"\n{name}: {size / 1e9:.2f} GB of weights, largest tensor {largest / 2**20:.0f} MiB")
    print(f"{'':44}{'seconds':>8}{'GB/s':>7}{'cp =1':>7}{'peak MiB':>10}{'beyond start':>14}")
    out = work / "out"
    jobs = {
        CP: (COPY, model, out),
        "convert --to-hf, 4 ranks": (CONVERT, work / "ranks", out, "to", ""),
        "convert --to-hf, whole": (CONVERT, model, out, "to", ""),
        "convert --from-hf --ranks 4": (CONVERT, model, out, "from", ""),
        "convert --to-hf --dtype float32, 4 ranks": (CONVERT, work / "ranks", out, "to", "float32"),
    }
    if with_torch:
        _run(MAKE_DCP, model, work / "dcp")
        jobs["dcp_to_torch_save + save_pretrained"] = (TORCHS_WAY, work / "dcp", model, out)
    idle, floor = _best(NOTHING, [], out, 1)
    seconds, conversions = {}, []
    for job, (script, *arguments) in jobs.items():
        seconds[job], peak = _best(script, arguments, out, repeat)
        ratio = seconds[CP] / seconds[job]
        mib = (peak - floor) / 2**20
        beyond = f"{mib:.0f}" if script is CONVERT else ""
        if script is CONVERT:
            growth = 2 if "float32" in job else 1  # models are mostly in bfloat16
            conversions.append(Conversion(job, seconds[job] - idle, mib, growth * seconds[CP]))
        rate = size / seconds[job] / 1e9
        print(
            f"{job:44}{seconds[job]:8.2f}{rate:7.2f}{ratio:7.2f}{peak / 2**20:10.0f}{beyond:>14}",
            flush=True,
        )
    print(f"starting Python and reading nothing: {idle:.2f} s, {floor / 2**20:.0f} MiB")
    shutil.rmtree(work)
    return conversions


def _best(script: str, arguments: list, out: Path, repeat: int) -> tuple[float, int]:
    """Seconds of the fastest run, and the largest peak memory in bytes."""
    times, peaks = [], []
    for _ in range(repeat):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        seconds, peak = _run(script, *arguments)
        times.append(seconds)
        peaks.append(peak)
    shutil.rmtree(out, ignore_errors=True)
    return min(times), max(peaks)


def _run(script: str, *arguments: object) -> tuple[float, int]:
    """Seconds and peak memory of a separate process; a process in between separates the peaks of
    its children."""
    timed = (
        "import json, os, resource, subprocess, sys, time\n"
        "start = time.monotonic()\n"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, "
        "stderr=subprocess.PIPE, text=True)\n"
        "seconds = time.monotonic() - start\n"
        "assert done.returncode == 0, done.stderr\n"
        "print(json.dumps([seconds, "
        "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]))\n"
    )
    command = [sys.executable, "-c", timed, sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def _largest(model: Path) -> int:
    from rlcli.checkpoint.tensor_files import stored_tensors

    return max(tensor.spec.bytes for tensor in stored_tensors(model).values())


if __name__ == "__main__":
    sys.exit(main())
