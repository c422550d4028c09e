"""Ranks verify a checkpoint before anything of it is loaded: each reads a part of the files, in threads.

A rank takes the files that a rank of its number wrote, which are those that it reads next if the layout is the same;
the others go to whoever has least to read. So every byte is read once, and nobody waits for a single reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlcli.checkpoint.manifest import FileDigest, read_manifest
from rlcli.checkpoint.state import writer_of
from rlcli.checkpoint.verify import damaged_files
from rlcli.errors import ModelError
from rlcli.runtime.ranks import Ranks

SLOWEST = 50e6
"""Bytes per second: storage that is slower than this, for all ranks together, counts as hanging."""


async def verify_on_ranks(checkpoint: Path, ranks: Ranks, world_size: int, deadline: float) -> list[ModelError]:
    """What is wrong with the files of a checkpoint, according to the ranks. `deadline`: seconds that they may take in
    addition to the time for reading."""
    manifest = read_manifest(checkpoint)
    shares = shared_out(manifest.files.values(), world_size)
    asked = {
        rank: {"folder": str(checkpoint), "files": [file.as_json() for file in share]}
        for rank, share in enumerate(shares)
        if share
    }
    answers = await ranks.ask("verify", asked, deadline + manifest.size / SLOWEST)
    return [ModelError(**fault) for rank in sorted(answers) for fault in answers[rank]["faults"]]


def shared_out(files: Iterable[FileDigest], world_size: int) -> list[list[FileDigest]]:
    """The files that each rank verifies."""
    shares: list[list[FileDigest]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for file in sorted(files, key=lambda file: (_rank(file, world_size) is None, -file.bytes, file.path)):
        rank = _rank(file, world_size)
        rank = sizes.index(min(sizes)) if rank is None else rank
        shares[rank].append(file)
        sizes[rank] += file.bytes
    return shares


def _rank(file: FileDigest, world_size: int) -> int | None:
    """The rank of this run whose number the writer of a file had."""
    rank = writer_of(file.path)
    return rank if rank is not None and rank < world_size else None


def verify_share(folder: str, files: Iterable[dict[str, Any]], threads: int) -> dict[str, Any]:
    """A rank's answer: what is wrong with its share."""
    faults = damaged_files(Path(folder), [FileDigest(**file) for file in files], threads)
    return {"faults": [{"what": one.what, "where": one.where, "code": one.code} for one in faults]}
