"""Rows that are read forward without being stored equal those of the file, from any start."""

import json
import sys

import datasets as library
import pytest
from torch.utils.data import Dataset, IterableDataset

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.api.dataset import is_stream, with_rows
from rlcli.errors import DataError, UsageError
from rlcli.registry import load, make_dataset
from rlcli.testing.tokenizer import byte_tokenizer

EXAMPLES = {
    name: load("datasets", name).EXAMPLES
    for name in ("chat", "paired", "prompt_answer", "math_prompts", "hf")
}


def build(path, kind="prompt_only", /, **args):
    args = {"path": str(path), "max_length": 60, **args}
    return make_dataset(
        DatasetAbstraction(kind, args), DatasetUtility(1, 0, 1, byte_tokenizer(chat=kind == "chat"))
    )


def as_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(samples):
    return [
        (sample.ids, {key: value.tolist() for key, value in sample.data.items()})
        for sample in samples
    ]


def rows_in_memory(path, kind="prompt_only", /, **args):
    dataset = build(path, kind, **args)
    assert not dataset.is_stream
    return contents(dataset[row] for row in range(len(dataset)))


@pytest.fixture(autouse=True)
def three_rows_in_memory(monkeypatch):
    monkeypatch.setattr(sys.modules["rlcli.datasets._text_rows"], "CHUNK", 3)


@pytest.fixture
def eleven_rows(tmp_path):
    """A file of eleven rows, of which the fifth and the sixth are too long."""
    rows = [{"prompt": f"row {number}" + 99 * "!" * (number in (5, 6))} for number in range(1, 12)]
    return as_jsonl(tmp_path / "rows.jsonl", rows)


@pytest.mark.parametrize("overlong", ["drop", "truncate_right"])
@pytest.mark.parametrize("start", [0, 1, 3, 4, 8, 9, 11, 50])
def test_a_stream_has_the_rows_of_the_file_from_any_start(eleven_rows, overlong, start):
    expected = rows_in_memory(eleven_rows, overlong=overlong)
    stream = build(eleven_rows, streaming=True, overlong=overlong)
    assert len(expected) == (9 if overlong == "drop" else 11)
    assert stream.is_stream
    assert (
        contents(stream.rows_from(0, start))
        == contents(stream.rows_from(3, start))
        == expected[start:]
    )


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_kind_of_rows_can_be_streamed(tmp_path, kind):
    path = as_jsonl(tmp_path / "rows.jsonl", [*EXAMPLES[kind]] * 2)
    stream = build(path, kind, streaming=True, max_length=500)
    assert stream.is_stream
    assert contents(stream.rows_from(0, 2)) == rows_in_memory(path, kind, max_length=500)[2:] != []


def test_readers_of_a_stream_are_independent(eleven_rows):
    stream = build(eleven_rows, streaming=True, overlong="truncate_left")
    first, second = stream.rows_from(0, 0), stream.rows_from(0, 7)
    mixed = [sample for pair in zip(first, second, strict=False) for sample in pair]
    expected = rows_in_memory(eleven_rows, overlong="truncate_left")
    assert contents(mixed[::2]) == expected[:4]
    assert contents(mixed[1::2]) == expected[7:]


@pytest.mark.parametrize("path", ["hf:owner/name", "folder"])
def test_the_library_reads_only_when_a_row_is_requested(monkeypatch, tmp_path, path):
    """Without `streaming` it copies all of a folder to its cache first."""
    read = []
    (tmp_path / "folder").mkdir()
    as_jsonl(tmp_path / "folder" / "rows.jsonl", [{"prompt": "p"}])
    monkeypatch.chdir(tmp_path)

    def load_dataset(name, config, *, split, streaming=False):
        assert streaming
        for number in range(100):
            read.append(number)
            yield {"prompt": f"p{number}"}

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    stream = build(path, streaming=True)
    assert read == []
    next(stream.rows_from(0, 0))
    assert read == [0, 1, 2]


def test_bad_rows_are_counted_over_the_entire_stream(tmp_path):
    rows = [{"prompt": "good" if number % 3 else ""} for number in range(12)]
    read = build(
        as_jsonl(tmp_path / "rows", rows), streaming=True, bad_rows="skip", max_bad_rows=3
    ).rows_from(0, 0)
    assert len([next(read) for _ in range(6)]) == 6
    with pytest.raises(DataError, match="4 bad rows, more than max_bad_rows = 3"):
        list(read)


def test_a_chunk_of_only_bad_rows_is_skipped(tmp_path):
    rows = [{"prompt": "good" if not 2 < number < 6 else ""} for number in range(9)]
    path = as_jsonl(tmp_path / "rows", rows)
    stream = build(path, streaming=True, bad_rows="skip")
    assert contents(stream.rows_from(0, 0)) == rows_in_memory(path, bad_rows="skip")


def test_a_chunk_of_only_overlong_rows_is_dropped(tmp_path):
    rows = [{"prompt": f"row {number}" + 99 * "!" * (number < 4)} for number in range(9)]
    path = as_jsonl(tmp_path / "rows.jsonl", rows)
    stream = build(path, streaming=True, overlong="drop")
    assert contents(stream.rows_from(0, 1)) == rows_in_memory(path, overlong="drop")[1:]
    changed = as_jsonl(tmp_path / "changed.jsonl", [*rows[:4], {"prompt": "row 9"}, *rows[5:]])
    assert stream.digest() != build(changed, streaming=True, overlong="drop").digest()


def test_a_stream_of_only_overlong_rows_is_refused(tmp_path):
    path = as_jsonl(tmp_path / "rows.jsonl", [{"prompt": 99 * "!"}] * 5)
    with pytest.raises(DataError, match="all 5 are longer than max_length = 60") as caught:
        list(build(path, streaming=True, overlong="drop").rows_from(0, 0))
    assert (caught.value.code, caught.value.where) == ("F80", str(path))


def test_a_stream_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        next(build(as_jsonl(tmp_path / "none", []), streaming=True).rows_from(0, 0))


def test_scores_are_refused_for_an_unlimited_stream(tmp_path, eleven_rows):
    scores = as_jsonl(tmp_path / "scores.jsonl", [{"id": "rows:1", "reward": 1.0}])
    with pytest.raises(UsageError, match="set max_rows"):
        build(eleven_rows, streaming=True, scores={"path": str(scores)})


def test_the_digest_of_a_stream_depends_on_its_first_rows(tmp_path):
    def digest(first):
        return build(
            as_jsonl(tmp_path / "two", [{"prompt": first}, {"prompt": "another"}]), streaming=True
        ).digest()

    assert digest("one") == digest("one") != digest("two")


class EpochDataset(IterableDataset):
    """A dataset as in torch's documentation; those of Hugging Face have `set_epoch` as well."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 5

    def __iter__(self):
        return (f"row {number} of pass {self.epoch}" for number in range(5))


def test_an_iterable_dataset_is_a_stream():
    stream = with_rows(EpochDataset())
    assert is_stream(stream)
    assert list(stream.rows_from(0, 3)) == ["row 3 of pass 0", "row 4 of pass 0"]
    assert next(stream.rows_from(2, 0)) == "row 0 of pass 2"
    assert list(stream.rows_from(0, 5)) == []


class MapDataset(Dataset):
    def __getitem__(self, row):
        return row

    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize("dataset", [[1, 2], MapDataset()], ids=["list", "torch's map-style"])
def test_an_indexable_dataset_is_returned_unchanged(dataset):
    assert with_rows(dataset) is dataset
