"""One save, as a run makes it: `python one_save.py CHECKPOINTS STEP CONTENT KEEP_LAST`.

Small enough to be killed at each of its system calls. What it does before the save opens START, so
that a trace tells where the save begins.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from rlcli.checkpoint.commit import abandon, begin, commit, seal, write_json
from rlcli.checkpoint.manifest import Manifest
from rlcli.checkpoint.retention import prune
from rlcli.disk_errors import disk_failure
from rlcli.errors import ResourceError

START = "the-save-starts-here"
RUN = "5a" * 16


def contents(step: int, content: str) -> dict[str, bytes]:
    """Relative path → content of the file."""
    moments = f"moments of {step} {content}"
    return {
        "workers/rank-00000.json": b'{"rank": 0}\n',
        "models/actor/config.json": f'{{"step": {step}}}\n'.encode(),
        "models/actor/model.safetensors": f"{step} {content} ".encode() * 20,
        "optim/actor/shard-00001-model-00001-of-00001.safetensors": moments.encode(),
    }


def save(
    checkpoints: Path,
    step: int,
    content: str = "",
    keep_last: int | None = None,
    metrics=None,
    run_id: str = RUN,
) -> Path:
    """Raises ResourceError, after abandoning the temporary folder as a run does."""
    temporary = begin(checkpoints, step, run_id)
    try:
        for name, text in contents(step, content).items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(text)
        files = seal(
            temporary, [write_json(temporary / "state.json", {"step": step, "content": content})]
        )
        files += seal(temporary, [temporary / name for name in contents(step, content)])
        manifest = Manifest(
            step, run_id, "1.0", 1, "digest", {file.path: file for file in files}, metrics or {}
        )
        committed = commit(temporary, manifest)
    except (OSError, ResourceError) as error:
        failure = disk_failure(error, temporary)
        abandon(temporary)
        raise failure from error
    if keep_last is not None:
        prune(checkpoints, keep_last, run_id=run_id, committed=committed)
    return committed


def main(checkpoints: Path, step: int, content: str, keep_last: int) -> int:
    try:
        save(checkpoints, step, content, keep_last)
    except ResourceError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    with suppress(FileNotFoundError):
        os.open(START, os.O_RDONLY)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
