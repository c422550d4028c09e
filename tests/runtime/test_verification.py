"""Ranks verify a checkpoint: who reads what, and what each finds."""

import asyncio
import hashlib
import os
from collections import Counter

import pytest

from rlcli.checkpoint import verify
from rlcli.checkpoint.manifest import MANIFEST, FileDigest, Manifest
from rlcli.checkpoint.verify import newest_complete, shared_out
from rlcli.runtime import checkpoints
from rlcli.runtime.checkpoints import verify_on_ranks
from rlcli.runtime.rank_checkpoints import verify_share


def part(rank, size=100, folder="models/actor"):
    return FileDigest(f"{folder}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors", size, "")


def test_a_rank_verifies_what_its_predecessor_wrote():
    files = [
        part(rank, folder=folder) for folder in ("models/actor", "optim/actor") for rank in range(4)
    ]
    assert shared_out(files, 4) == [[files[rank], files[rank + 4]] for rank in range(4)]


def test_other_files_are_verified_once_by_the_ranks_with_least_to_read():
    files = [part(rank, size=1000) for rank in range(8)]
    files += [FileDigest(f"file{number}", 500, "") for number in range(8)]
    shares = shared_out(files, 4)
    assert Counter(file.path for share in shares for file in share) == Counter(
        file.path for file in files
    )
    assert {sum(file.bytes for file in share) for share in shares} == {3000}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step-000000000003"
    contents = {f"models/actor/file{number}": os.urandom(5000) for number in range(6)}
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    files = {
        path: FileDigest(path, len(content), hashlib.sha256(content).hexdigest())
        for path, content in contents.items()
    }
    (folder / MANIFEST).write_bytes(Manifest(3, "run", "0", 2, "digest", files).as_bytes())
    return folder


class AnsweringRanks:
    """Ranks that answer at once."""

    def __init__(self):
        self.deadlines = []

    async def ask(self, op, args, deadline):
        assert op == "verify"
        self.deadlines.append(deadline)
        return {rank: verify_share(**asked, threads=2) for rank, asked in args.items()}


def test_ranks_find_each_changed_byte(checkpoint):
    assert asyncio.run(verify_on_ranks(checkpoint, AnsweringRanks(), 4, 60)) == []
    damaged = checkpoint / "models/actor/file4"
    content = bytearray(damaged.read_bytes())
    for place in (0, 2500, 4999):
        content[place] ^= 1
        damaged.write_bytes(content)
        content[place] ^= 1
        (fault,) = asyncio.run(verify_on_ranks(checkpoint, AnsweringRanks(), 4, 60))
        assert (fault.code, fault.where) == ("F18", str(damaged))


def test_large_checkpoints_get_time_to_be_read(checkpoint, monkeypatch):
    monkeypatch.setattr(checkpoints, "SLOWEST", 100)
    ranks = AnsweringRanks()
    asyncio.run(verify_on_ranks(checkpoint, ranks, 1, 60))
    assert ranks.deadlines == [60 + 6 * 5000 / 100]


def test_the_master_finds_incomplete_checkpoints_without_reading_their_content(
    checkpoint, monkeypatch
):
    monkeypatch.setattr(verify.hashlib, "file_digest", None)
    rejected = {}
    assert newest_complete(checkpoint.parent, "run", rejected).path == checkpoint
    assert rejected == {}
    (checkpoint / "models/actor/file2").write_bytes(b"short")
    assert newest_complete(checkpoint.parent, "run", rejected) is None
    assert [fault.code for fault in rejected.values()] == ["F17"]
