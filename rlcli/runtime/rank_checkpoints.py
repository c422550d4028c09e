"""Writing a rank's part of a checkpoint while training continues, and verifying it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rlcli.checkpoint.commit import seal
from rlcli.checkpoint.manifest import FileDigest
from rlcli.checkpoint.verify import damaged_files
from rlcli.disk_errors import disk_failure
from rlcli.messaging.messages import WRITTEN, Failure, Tell
from rlcli.registry.faults import attribute_user_errors


def write_and_report(
    folder: Path, step: int, rank: int, write: Callable[[], Sequence[Path]], report: Tell
) -> threading.Thread:
    """Write files in a thread and seal them: sync and digest. It reports WRITTEN with the
    checkpoint's `step`, the digests of its `files`, and when it `began` and `ended`, or with the
    error: ResourceError if the disk was the cause."""

    def work() -> None:
        sealed: list[FileDigest] = []
        failure, began = None, time.monotonic()
        try:
            with attribute_user_errors():
                sealed = seal(folder, write())
        except BaseException as error:
            failure = Failure.of(disk_failure(error, folder) or error, f"rank {rank}", shown=error)
        value = {
            "step": step,
            "files": [digest.as_json() for digest in sealed],
            "began": began,
            "ended": time.monotonic(),
        }
        report(WRITTEN, value, failure)

    thread = threading.Thread(target=work, name="checkpoint", daemon=True)
    thread.start()
    return thread


def verify_share(folder: str, files: Iterable[dict[str, Any]], threads: int) -> dict[str, Any]:
    """What is wrong with this rank's share of the files of a checkpoint,
    of which nothing has been loaded yet."""
    faults = damaged_files(Path(folder), [FileDigest(**file) for file in files], threads)
    return {
        "faults": [
            {"what": fault.what, "where": fault.where, "code": fault.code} for fault in faults
        ]
    }
