"""Compares the files of a disturbed run with those of an undisturbed one."""

import fcntl
import hashlib
import json
from pathlib import Path

import yaml

from rlcli.runtime.data_order import DataOrder, training_id

COUNTERS = ("time/", "bytes/", "restarts/", "tokens_per_second", "perf/")
"""Metrics of a process or a machine rather than of the training."""


def result(folder: Path) -> dict[str, str]:
    """Digests of all results that must not depend on disturbances of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [
        {
            key: value
            for key, value in line.items()
            if not key.startswith(COUNTERS)
            and not key.endswith(("/calls", "/replayed"))
            and "/servers/" not in key
        }
        for line in lines
    ]
    texts = {
        "metrics": json.dumps(numbers, sort_keys=True),
        "ledger": (folder / "ledger.jsonl").read_text(),
        "samples": (folder / "samples.jsonl").read_text(),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    for file in sorted(path for path in folder.glob("models/*/*") if path.is_file()):
        digests[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def check_accounting(folder: Path) -> bool:
    """Whether a run has a checkpoint. By it, each (epoch, row) that was drawn must be in exactly
    one place: trained on, dropped, ready to be trained on, or waiting to be drawn again."""
    committed = sorted(
        path
        for path in (folder / "checkpoints").glob("step-*")
        if (path / "MANIFEST.json").exists()
    )
    if not committed:
        return False
    state = json.loads((committed[-1] / "state.json").read_text())
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    done = [json.loads(line) for line in lines if line.endswith("}")]
    places = [entry["sample"] for entry in done if entry["step"] <= state["step"]]
    places += [training_id(epoch, row) for epoch, row, _ in state["returned"]]
    places += [training_id(*one["draw"][:2]) for one in state["ready"]]
    recipe = yaml.safe_load((folder / "recipe.resolved.yaml").read_text())
    size = recipe["datasets"][recipe["train"]["dataset"]]["args"]
    rows = size["problems"] if "problems" in size else size["rows"]
    order = DataOrder(rows, recipe["seed"], recipe["train"]["shuffle"])
    drawn = [training_id(*order.at(place)) for place in range(state["drawn"])]
    if sorted(places) != sorted(drawn):
        raise SystemExit(f"{committed[-1]}: drawn {sorted(drawn)}, accounted for {sorted(places)}")
    return True


def plays_again(folder: Path) -> bool:
    """Whether a run has played episodes again because their environment failed once."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return any(
        share > record[key.replace("/replayed", "/discarded")]
        for record in records
        for key, share in record.items()
        if key.endswith("/replayed")
    )


def forks(folder: Path) -> bool:
    """Whether episodes of a run have forked."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return any(
        number > 0 for record in records for key, number in record.items() if key.endswith("/forks")
    )


def check_staleness(folder: Path) -> None:
    """Check that an ended run trained on each sample once, with weights within the recipe's limit
    of staleness, and dropped others for a reason."""
    train = yaml.safe_load((folder / "recipe.resolved.yaml").read_text())["train"]
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["state"] == "trained"]
    if unexplained := [line for line in lines if line not in trained and not line.get("reason")]:
        raise SystemExit(f"{folder}: neither trained on nor dropped for a reason: {unexplained}")
    lags = [line["step"] - 1 - version for line in trained for version in line["versions"].values()]
    samples = train["steps"] * train["prompts_per_step"]
    if not len(trained) == len({line["sample"] for line in trained}) == len(lags) == samples:
        raise SystemExit(
            f"{folder}: {len(trained)} samples were trained on, not {samples} once each"
        )
    if not 0 <= min(lags) <= max(lags) <= train["max_staleness"]:
        raise SystemExit(
            f"{folder}: staleness {sorted(set(lags))}, of at most {train['max_staleness']}"
        )


def is_free(lock: Path) -> bool:
    """Whether no process holds the lock any more."""
    if not lock.exists():
        return True
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def check_segments(folder: Path, has_turns: bool = False) -> int:
    """Check that responses were continued only with newer weights, except from turn to turn, that
    staleness counts the oldest of a response, and that all are older than the step that trained on
    it. Returns the most weights that a response is of."""
    most = 1
    for line in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()):
        for spans in line.get("segments", ()):
            versions = [version for version, _ in spans]
            is_ordered = versions == sorted(versions if has_turns else set(versions))
            if not is_ordered or line["versions"]["actor_gen"] > versions[0]:
                raise SystemExit(f"{folder}: {line}: segments are not from newer and newer weights")
            if versions[-1] >= line["step"]:
                raise SystemExit(f"{folder}: {line}: was sampled with weights of its own step")
            most = max(most, len(set(versions)))
    return most
