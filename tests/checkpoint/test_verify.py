"""Verification finds every changed byte, every missing file and every forged manifest."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
from pathlib import Path

import pytest
from heard_work import heard_work
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.headway import BYTES, Count
from rlcli.checkpoint.manifest import FORMAT, MANIFEST, SEAL, read_manifest
from rlcli.checkpoint.verify import checkpoints_in, examine, newest_verified, verify
from rlcli.errors import ModelError, RlcliError

one_save = runpy.run_path(str(Path(__file__).with_name("one_save.py")))
save, RUN = one_save["save"], one_save["RUN"]
TENSORS = "models/actor/model.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "checkpoints", 7, metrics={"eval/accuracy": 0.25})


def refusal(checkpoint: Path, **options) -> ModelError:
    with pytest.raises(ModelError) as caught:
        verify(checkpoint, **options)
    assert caught.value.exit_code == 5
    return caught.value


def forge(checkpoint: Path, fields: dict) -> None:
    """A manifest with a correct digest and the given fields."""
    head = json.dumps(fields, indent=1).removesuffix("\n}").encode()
    (checkpoint / MANIFEST).write_bytes(
        head + SEAL + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'
    )


def fields_of(checkpoint: Path) -> dict:
    fields = json.loads((checkpoint / MANIFEST).read_bytes())
    del fields["sha256"]
    return fields


@pytest.mark.long
def test_every_flipped_bit_is_found(checkpoint):
    """One bit of each byte of each file, including the manifest,
    and all eight bits of the first bytes."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    flips = 0
    for file in files:
        content = file.read_bytes()
        for position in range(len(content)):
            bits = range(8) if position < 24 else [position % 8]
            for bit in bits:
                changed = bytearray(content)
                changed[position] ^= 1 << bit
                file.write_bytes(changed)
                assert examine(checkpoint).faults, f"bit {bit} of byte {position} of {file.name}"
                flips += 1
        file.write_bytes(content)
    assert flips > sum(file.stat().st_size for file in files)
    assert verify(checkpoint).manifest.step == 7


@pytest.mark.parametrize("length", [-1, 0.5, 0, 8])
@pytest.mark.parametrize(
    "name", [TENSORS, "state.json", "optim/actor/shard-00001-model-00001-of-00001.safetensors"]
)
def test_a_truncated_file_is_reported_with_both_sizes(checkpoint, name, length):
    file = checkpoint / name
    size = file.stat().st_size
    cut = {-1: size - 1, 0.5: size // 2, 0: 0, 8: 8}[length]
    os.truncate(file, cut)
    error = refusal(checkpoint)
    assert (error.code, error.where) == ("F17", str(file))
    assert f"size {cut}" in error.what
    assert str(size) in error.what
    assert examine(checkpoint, read=False).state == "corrupt"


@pytest.mark.parametrize("name", [TENSORS, "state.json"])
def test_a_changed_file_of_the_same_size_is_reported(checkpoint, name):
    file = checkpoint / name
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert (refusal(checkpoint).code, refusal(checkpoint).where) == ("F18", str(file))


def test_every_damaged_file_is_reported(checkpoint):
    (checkpoint / TENSORS).unlink()
    (checkpoint / "state.json").write_text("{}")
    report = examine(checkpoint)
    assert {fault.where for fault in report.faults} == {
        str(checkpoint / TENSORS),
        str(checkpoint / "state.json"),
    }
    assert report.state == "incomplete"


GARBAGE = {
    "empty": b"",
    "bytes": bytes(range(256)) * 9,
    "no object": b"[1, 2]\n",
    "a number": b"1",
    "NaN": b'{"format": 1, "step": NaN}',
    "huge number": b'{"format": 1, "step": ' + b"9" * 10_000 + b"}",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"format":' * 100_000 + b"1" + b"}" * 100_000,
    "another file's": json.dumps({"step": 7, "loss": 1.0}).encode(),
    "format of no version": b'{"format": true}',
    "format zero": b'{"format": 0}',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("name", [MANIFEST, "state.json"])
def test_garbage_in_a_file_is_refused(checkpoint, name, content):
    (checkpoint / name).write_bytes(content)
    assert refusal(checkpoint).code in (("F19",) if name == MANIFEST else ("F17",))


@given(
    content=st.binary(max_size=300)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)
)
def test_arbitrary_content_is_refused_as_a_manifest(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("forged")
    (folder / MANIFEST).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError):
        read_manifest(folder)


def _with(key: str, value: object):
    return lambda fields: fields | {key: value}


FORGERIES = {
    "a key is missing": lambda fields: {
        key: value for key, value in fields.items() if key != "world_size"
    },
    "a key is unknown": _with("extra", 1),
    "step is negative": _with("step", -1),
    "step is a float": _with("step", 7.0),
    "step is true": _with("step", True),
    "run id is a number": _with("run_id", 5),
    "metrics are a list": _with("metrics", [1.0]),
    "a metric is infinite": _with("metrics", {"loss": float("1e400")}),
    "a metric is text": _with("metrics", {"loss": "0.5"}),
    "files are a list": _with("files", ["state.json"]),
    "a file without a digest": _with("files", {"state.json": {"bytes": 3}}),
    "a file above": _with("files", {"../../secret": {"bytes": 3, "sha256": ""}}),
    "a file elsewhere": _with("files", {"/etc/passwd": {"bytes": 3, "sha256": ""}}),
    "a file of no name": _with("files", {"": {"bytes": 3, "sha256": ""}}),
    "one file by two names": _with("files", {"a//b": {"bytes": 3, "sha256": ""}}),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_invalid_fields_are_refused_despite_a_correct_digest(checkpoint, change):
    forge(checkpoint, change(fields_of(checkpoint)))
    assert refusal(checkpoint).code == "F19"


def test_the_bytes_that_are_verified_are_counted(checkpoint):
    with heard_work() as heard:
        size = verify(checkpoint).manifest.size
    assert heard.phases == [f"verifying {checkpoint.name}", ""]
    assert heard.counts[-1] == Count(size, size, BYTES)


def test_a_rewritten_valid_manifest_is_accepted(checkpoint):
    """Otherwise the test above might find the forging itself."""
    before = read_manifest(checkpoint)
    forge(checkpoint, fields_of(checkpoint))
    assert verify(checkpoint).manifest == before


def test_a_newer_format_is_refused_with_both_numbers(checkpoint):
    forge(checkpoint, fields_of(checkpoint) | {"format": FORMAT + 1, "novelty": []})
    error = refusal(checkpoint)
    assert error.code == "F85"
    assert f"format {FORMAT + 1}" in error.what
    assert f"reads {FORMAT}" in error.what


def test_a_newer_format_is_not_skipped_for_an_older_checkpoint(checkpoint):
    newer = save(checkpoint.parent, 8)
    forge(newer, fields_of(newer) | {"format": FORMAT + 1})
    with pytest.raises(ModelError) as caught:
        newest_verified(checkpoint.parent)
    assert (caught.value.code, caught.value.where) == ("F85", str(newer))


def test_a_huge_manifest_is_not_read(checkpoint):
    os.truncate(checkpoint / MANIFEST, 2**40)  # a hole; takes no room
    assert "too large" in refusal(checkpoint).what


def test_a_missing_manifest_is_reported(checkpoint):
    (checkpoint / MANIFEST).unlink()
    assert refusal(checkpoint).code == "F20"
    assert examine(checkpoint).state == "incomplete"


def test_additional_files_are_listed_and_not_read(checkpoint):
    (checkpoint / "models/actor/extra.bin").write_text("?")
    (checkpoint / "more").symlink_to("/")
    assert verify(checkpoint).strangers == ("models/actor/extra.bin", "more")


def test_links_are_refused(checkpoint, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(checkpoint / "models", outside)
    (checkpoint / "state.json").rename(tmp_path / "state.json")
    (checkpoint / "state.json").symlink_to(tmp_path / "state.json")
    error = refusal(checkpoint)
    assert (error.code, error.where) == ("F20", str(checkpoint / "state.json"))
    (checkpoint / "state.json").unlink()
    (tmp_path / "state.json").rename(checkpoint / "state.json")
    verify(checkpoint)
    shutil.rmtree(checkpoint / "models")
    (checkpoint / "models").symlink_to(outside)
    assert refusal(checkpoint).code == "F20"
    link = checkpoint.with_name("step-000000000008")
    link.symlink_to(checkpoint)
    assert refusal(link).code == "F20"


@pytest.mark.parametrize("name", [MANIFEST, "state.json"])
def test_a_pipe_instead_of_a_file_does_not_block(checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refusal(checkpoint)


def test_a_checkpoint_of_another_run_is_refused_with_its_id(checkpoint):
    assert verify(checkpoint, run_id=RUN)
    error = refusal(checkpoint, run_id="other")
    assert error.code == "F19"
    assert RUN in error.what


def test_a_copy_named_after_another_step_is_refused(checkpoint):
    copied = checkpoint.with_name("step-000000000009")
    shutil.copytree(checkpoint, copied)
    assert "step 7" in refusal(copied).what
    assert verify(checkpoint.rename(checkpoint.with_name("my-best"))).manifest.step == 7


def test_the_newest_valid_checkpoint_is_found_and_newer_ones_are_reported(tmp_path):
    folder = tmp_path / "checkpoints"
    saved = [save(folder, step) for step in (1, 2, 10, 11)]
    (folder / "step-12").mkdir()
    (folder / "LATEST.json").write_text('{"checkpoint": "step-000000000099"}')
    (saved[3] / "state.json").write_text("")
    (saved[2] / MANIFEST).unlink()
    checkpoint, rejected = newest_verified(folder)
    assert checkpoint.manifest.step == 2
    assert [error.code for error in rejected] == ["F17", "F20"]
    assert [error.where for error in rejected] == [str(saved[3] / "state.json"), str(saved[2])]
    assert checkpoints_in(folder) == saved[::-1]


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert newest_verified(tmp_path / "none") == (None, [])
    (tmp_path / "file").touch()
    assert checkpoints_in(tmp_path / "file") == []


def test_a_manifest_is_refused_in_bounded_time(checkpoint):
    """It lists a hundred thousand missing files."""
    entry = {"bytes": 1, "sha256": "0" * 64}
    forge(checkpoint, fields_of(checkpoint) | {"files": {f"f{n}": entry for n in range(100_000)}})
    with pytest.raises(RlcliError):
        verify(checkpoint)
