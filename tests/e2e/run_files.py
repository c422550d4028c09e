"""The files that a run leaves in its folder."""

import json


def numbers(folder):
    """The records of a run without times; `calls` counts the steps of a process, not of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "bytes/", "tokens_per_second", "perf/")
    return [
        {
            key: value
            for key, value in record.items()
            if not key.startswith(clocks) and not key.endswith("/calls")
        }
        for record in records
    ]


def samples(folder):
    """The recorded responses, with their rewards and log-probs."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def checkpoints(folder):
    return sorted(
        int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")
    )


def files(folder):
    """All files of a run except its lock."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def ledger(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
