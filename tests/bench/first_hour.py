"""The first hour of a new user, as a recording: every command with its time, exit code and output.

    python tests/bench/first_hour.py [--rlcli /path/to/rlcli] [--lines 12] > first_hour.md

The commands are those of the README, in an empty folder, with the smallest recipes and few steps.
It ends with 1 if a command ends otherwise than expected. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOUR = """\
# Look around
rlcli
rlcli doctor
rlcli ls
rlcli ls recipes
rlcli show ppo_math
rlcli show ppo_actor
rlcli explain ppo_math ppo.kl_ctl
rlcli validate ppo_math
rlcli check ppo_math --rows 50
rlcli tokens sft_math --row 17
rlcli plan ppo_math
rlcli plan ppo_math --devices 8 --device-memory 80

# Train
rlcli train sft_math train.steps=20
rlcli train ppo_math models.actor.path=$(echo runs/sft_math/*/models/actor) train.steps=2
rlcli status
rlcli status ppo_math
rlcli samples ppo_math --worst 2
rlcli plot ppo_math reward kl
rlcli ckpt ls ppo_math
rlcli compare ppo_math sft_math
rlcli resume ppo_math train.steps=3 --accept-changes

# Try the model
rlcli eval sft_math --dataset ppo_math --rows 8
rlcli generate sft_math --prompt "What is 14+4-5-5?"
echo "What is 2+3?" | rlcli chat sft_math
rlcli convert sft_math --role actor --to-hf out/model

# A model and rows of one's own
rlcli train sft --model out/model --data rows.jsonl train.prompts_per_step=4
rlcli train grpo --model out/model --data sums.jsonl train.prompts_per_step=4
rlcli cp sft mine.yaml models.actor.path=out/model datasets.train.args.path=rows.jsonl
rlcli validate mine.yaml
rlcli diff sft_math mine.yaml

# Components of one's own
rlcli new project my-project
cd my-project && rlcli new dataset my-dataset
cd my-project && rlcli test dataset my-dataset
cd my-project && rlcli new reward my-reward
cd my-project && rlcli test interface my-reward

# Mistakes
rlcli train gsm8k  # 2
rlcli run ppo_math  # 2
rlcli train ppo_math ppo.kl_clt=0.1  # 2
rlcli train ppo_math models.critic=null  # 2
rlcli train sft --model out/model --data row.jsonl  # 4
rlcli train --gpus 8 ppo_math  # 2
"""
"""A command on each line; after `  # `, the exit code that it has if not 0."""
LIMIT_S = 600


def write_rows(folder: Path) -> None:
    """Rows of prompts with answers, and sums."""
    rows = [{"prompt": f"What is {n}+{n}?", "completion": str(2 * n)} for n in range(8)]
    sums = [{"question": row["prompt"], "answer": row["completion"]} for row in rows]
    for name, entries in (("rows.jsonl", rows), ("sums.jsonl", sums)):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def record(line: str, folder: Path, environment: dict[str, str], lines: int) -> bool:
    """Run a command and print it with its time, exit code and last lines. Returns whether it ended
    as expected."""
    command, _, code = line.partition("  # ")
    began = time.perf_counter()
    finished = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    seconds = time.perf_counter() - began
    shown = finished.stdout.rstrip().splitlines()
    left_out = [f"[{len(shown) - lines} more lines above]"] if len(shown) > lines else []
    output = "\n".join([*left_out, *shown[-lines:]])
    print(f"```\n$ {command}\n{output}\n```\n{seconds:.1f} s, exit code {finished.returncode}\n")
    sys.stdout.flush()
    return finished.returncode == int(code or 0)


def main() -> int:
    """Record the hour; returns 1 if a command ended otherwise than expected."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rlcli", default=shutil.which("rlcli"), help="the command to use")
    parser.add_argument("--lines", type=int, default=12, help="last lines shown of each output")
    options = parser.parse_args()
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(options.rlcli).parent), environment["PATH"]])
    surprises: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        for line in filter(None, HOUR.splitlines()):
            if line.startswith("# "):
                print(f"#{line}\n")
            elif not record(line, folder, environment, options.lines):
                surprises.append(line)
    print(
        "\n".join(
            ["Ended otherwise than expected:", *surprises] if surprises else ["All as expected."]
        )
    )
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
