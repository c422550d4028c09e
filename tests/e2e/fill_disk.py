"""Fills the disk of a run, and resumes it once there is space:
`python fill_disk.py NAME TIMES SEED FOLDER`.

NAME is one of those of `kill_anywhere`; FOLDER is on a small separate file system, such as a tmpfs
of a few MB. Prints the exit codes of the runs whose disk was full, and which ended runs differ from
an undisturbed one. Ends with an error where a resumed run fails, or a row that was drawn is not
accounted for or was trained on twice.
"""

import contextlib
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

from kill_anywhere import (
    ALGORITHMS,
    APART,
    QUICK,
    check_accounting,
    check_staleness,
    finish,
    is_free,
    quietly,
    reference_run,
    result,
)
from warm_command import load_everything

CHECKPOINTS = (
    "checkpoint.every_steps=1",
    "checkpoint.max_failed_saves=0",
    "checkpoint.keep_last=1",
)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as room:
        for size in (1 << 16, 1 << 8, 1):
            with contextlib.suppress(OSError):
                while room.write(bytes(size)):
                    pass


def run_on_full_disk(settings: tuple[str, ...], folder: Path, seconds: float) -> int:
    """The exit code of a run whose disk is full after `seconds`, and which is resumed then."""
    pid, filler = (
        quietly(["train", *settings, "--run-dir", str(folder)]),
        folder.with_name("filler"),
    )
    time.sleep(seconds)
    fill(filler)
    code = finish(pid)
    while not is_free(folder / "lock"):
        time.sleep(0.01)
    filler.unlink()
    if code and (folder / "recipe.resolved.yaml").exists():
        again = finish(quietly(["resume", str(folder)]))
    else:  # it ended before, or was full before there was a run
        shutil.rmtree(folder, ignore_errors=True)
        again = finish(quietly(["train", *settings, "--run-dir", str(folder)]))
    if again:
        raise SystemExit(
            f"{folder}: after exit code {code}, resuming ended with {again}: "
            f"{Path('log.txt').read_text()}"
        )
    return code


def main(name: str, times: int, seed: int, home: Path) -> None:
    load_everything()
    quick = [one for one in QUICK if not one.startswith("checkpoint.")]
    settings = (*(ALGORITHMS | APART)[name], *quick, *CHECKPOINTS)
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    draws = random.Random(seed)
    seconds, expected = reference_run(settings)
    codes, differing = [], []
    for number in range(times):
        folder = Path(f"run{number}")
        codes.append(run_on_full_disk(settings, folder, draws.uniform(0.3, 0.9) * seconds))
        check_accounting(folder)
        if "async" in settings:
            check_staleness(folder)
        elif wrong := [
            name for name, digest in result(folder).items() if expected.get(name) != digest
        ]:
            differing.append({"run": str(folder), "differs": wrong})
        shutil.rmtree(folder)
    print(
        json.dumps(
            {"exit_codes": codes, "seconds_of_a_run": round(seconds, 2), "differing": differing}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
