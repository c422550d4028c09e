"""The same dataset in other processes, with other hash seeds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.registry import load, make_dataset
from rlcli.testing.dataset_checks.first_rows import by_number
from rlcli.testing.dataset_checks.trial import Trial, content_of, id_of, shown_rows, suited
from rlcli.testing.elsewhere import PATIENCE, start

HASH_SEEDS = ("0", "1")
HEAVY = ("torch", "transformers")


def answers(
    trial: Trial, rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(hash seed, results from a process with that hash seed for the dataset of these rows),
    for each."""
    words = {
        "backend": trial.tokenizer.backend.to_str(),
        "special_tokens": trial.tokenizer.special_tokens_map,
        "chat_template": trial.tokenizer.chat_template,
    }
    datasets = {name: [dataset.type_, dataset.args] for name, dataset in trial.datasets.items()}
    args = trial.args_for(rows)
    order = json.dumps({"name": trial.name, "args": args, "datasets": datasets, "tokenizer": words})
    seeds = [seed for seed in HASH_SEEDS if seed != os.environ.get("PYTHONHASHSEED")]
    if not hasattr(trial.cls, "preview"):
        seeds = seeds[:1]  # each takes seconds to load torch and transformers
    with contextlib.ExitStack() as ended:
        processes = [ended.enter_context(start(__name__, order, seed)) for seed in seeds]
        for process in processes:
            ended.callback(process.kill)
        for seed, process in zip(seeds, processes, strict=True):
            out, err = process.communicate(timeout=PATIENCE)
            if process.returncode:
                raise RuntimeError(f"the dataset cannot be read in another process:\n{err[-2000:]}")
            yield seed, json.loads(out.splitlines()[-1])


def as_read(dataset: Any) -> dict[str, Any]:
    """Its first rows in JSON, by their previews if it has any."""
    rows: list[dict[str, Any]] = []
    for index in range(shown_rows(dataset)):
        if hasattr(dataset, "preview"):
            rows.append(dataclasses.asdict(dataset.preview(index)))
        else:
            sample = dataset[index]
            rows.append({"id": id_of(sample), **content_of(sample)})
    heavy = [name for name in HEAVY if name in sys.modules]
    return json.loads(json.dumps({"rows": rows, "heavy": heavy}))


def _main(order: Mapping[str, Any]) -> None:
    from tokenizers import Tokenizer

    words = dict(order["tokenizer"])
    tokenizer = LightTokenizer(Tokenizer.from_str(words.pop("backend")), **words)
    datasets = {
        name: DatasetAbstraction(*described) for name, described in order["datasets"].items()
    }
    util = DatasetUtility(1, 0, 1, suited(tokenizer, load("datasets", order["name"])), datasets)
    print(
        json.dumps(
            as_read(by_number(make_dataset(DatasetAbstraction(order["name"], order["args"]), util)))
        )
    )


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
