"""The README.md of a run: how to repeat it, and what its files hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path


def repetition(command: Sequence[str]) -> str:
    """The line for a shell that starts such a run again, in a folder of its own; `command` is what
    started it."""
    program = Path(command[0]).name
    is_module = program == "__main__.py"
    words = ["python", "-m", "rlcli"] if is_module else [program]
    return shlex.join([*words, *_without_folder(command[1:])])


def _without_folder(arguments: Iterable[str]) -> list[str]:
    """The arguments without `--run-dir`: that folder is taken now."""
    remaining: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*remaining, word, *words]
        if word == "--run-dir":
            next(words, None)
        elif not word.startswith("--run-dir="):
            remaining.append(word)
    return remaining


def readme(recipe_name: str, run_id: str, started: str, command: Sequence[str]) -> str:
    """The content of README.md."""
    return README.format(
        recipe=recipe_name,
        run_id=run_id,
        started=started,
        folder=Path.cwd(),
        command=repetition(command),
    )


README = """\
# A run of {recipe}

Started {started} (run {run_id}). To repeat it, in `{folder}`:

```
{command}
```

| file | holds |
| --- | --- |
| `status.json` | state, step, exit code |
| `metrics.jsonl` | one JSON object per step |
| `samples.jsonl` | prompts, responses, rewards |
| `curve.png` | the learning curve |
| `trace.json` | the timeline of the last steps, for `rlcli profile` and https://ui.perfetto.dev |
| `ledger.jsonl` | each row that was drawn, `e<epoch>r<row>`: trained on (by which weights' \
versions) or dropped (why) |
| `checkpoints/` | what `rlcli resume` continues from |
| `committed.json` | the last committed step, and whether the run is done |
| `models/<role>/` | the trained models, as `transformers.from_pretrained` reads them |
| `recipe/`, `recipe.resolved.yaml`, `origins.json` | the recipe as written, as it ran, and its \
origins |
| `starts.json`, `resumes.jsonl` | what it began with; what changed whenever it was resumed |
| `memory.json` | the highest point of the memory plan |
| `setup.json` | how long each phase before the first step took |
| `environment.json` | versions, machine, commit |
| `tensorboard/` | the metrics for `tensorboard --logdir` |
| `trackers/` | what remaining trackers have of the run (`log.trackers`) |
| `profile/` | the operations of traced steps (`--profile`) |
| `logs/` | output of the workers |
| `crash/` | the samples of steps that ended the run because they were not finite |
| `procs.json`, `worker.json` | of a run of several processes: which they are, and its recipe as \
they read it |
| `job.json`, `job.sbatch`, `job-values.json`, `job.allocations.jsonl` | of a Slurm job: its \
number, its script and what that runs, when it began |
| `stop.json` | which process `rlcli stop` has asked to end |
| `lock`, `recipe.digest` | who works on the run; whether a recipe is still the one that it ran |
"""
