"""The same dataset in other processes, with other hash seeds."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcli.registry import load
from rlcli.testing.dataset_checks.records import records
from rlcli.testing.dataset_checks.trial import Rows, Trial, shown_rows, usual_tokenizer
from rlcli.testing.elsewhere import answers_elsewhere

HASH_SEEDS = ("0", "1")
HEAVY = ("torch", "transformers")


def answers(trial: Trial, rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """(hash seed, results from a process with that hash seed for the dataset of these rows),
    for each."""
    order = {"name": trial.name, "args": trial.args_for(rows)}
    seeds = [seed for seed in HASH_SEEDS if seed != os.environ.get("PYTHONHASHSEED")]
    if not hasattr(trial.cls, "preview"):
        seeds = seeds[:1]  # each takes seconds to load torch and transformers
    return answers_elsewhere(__name__, order, seeds)


def as_read(dataset: Any) -> dict[str, Any]:
    """Its first rows in JSON, by their previews if it has any; and what these have loaded."""
    numbers = range(shown_rows(dataset))
    if not hasattr(dataset, "preview"):
        rows, heavy = records(dataset[index] for index in numbers), []
    else:
        rows = [dataclasses.asdict(dataset.preview(index)) for index in numbers]
        heavy = [name for name in HEAVY if name in sys.modules]
    return json.loads(json.dumps({"rows": rows, "heavy": heavy}))


def _main(name: str, args: Mapping[str, Any]) -> None:
    tokenizer = usual_tokenizer(load("datasets", name))
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(name, args, Path(folder), tokenizer)
        print(json.dumps(as_read(trial.make_of_whole_file())))


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
