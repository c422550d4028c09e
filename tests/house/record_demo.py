"""Make a run the one that comes with rlcli (`rlcli report --demo`), without the names of folders
and computers.

    rlcli train ppo_math seed=1 && python tests/house/record_demo.py runs/ppo_math/<time>
    python tests/house/pictures.py
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rlcli.observe.page.rendering import DEMO

AS_THEY_ARE = (
    "metrics.jsonl",
    "samples.jsonl",
    "recipe.resolved.yaml",
    "memory.json",
    "curve.png",
    "trace.json",
)


def record(run: Path) -> None:
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    for name in AS_THEY_ARE:
        shutil.copyfile(run / name, DEMO / name)
    _write("status.json", _read(run, "status.json") | {"host": None, "pid": None})
    origins = {key: _without_folders(origin) for key, origin in _read(run, "origins.json").items()}
    _write("origins.json", origins)
    environment = _read(run, "environment.json")
    environment["command"][0] = "rlcli"
    for name in ("host", "executable", "working_directory"):
        del environment[name]
    _write("environment.json", environment)


def _read(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / name).read_text())


def _write(name: str, content: dict[str, Any]) -> None:
    (DEMO / name).write_text(json.dumps(content, indent=1) + "\n")


def _without_folders(origin: str) -> str:
    """`recipes/base/ppo.yaml:3:1`."""
    _, is_in_a_folder, within = origin.rpartition("/recipes/")
    return f"recipes/{within}" if is_in_a_folder else origin


if __name__ == "__main__":
    record(Path(sys.argv[1]))
