"""Rows in formats other than JSON: equal rows from each, locations, refusals,
and an unreachable Hub."""

import csv
import gzip
import json
import re
import subprocess
import sys

import datasets as library
import huggingface_hub
import pyarrow
import pytest
from pyarrow import ipc, parquet

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.datasets._sources import RowSource
from rlcli.errors import DataError, UsageError
from rlcli.files import LFS_POINTER
from rlcli.registry import make_dataset
from rlcli.testing.tokenizer import byte_tokenizer

ROWS = [{"prompt": f"p{number}", "answer": "ä, or\nnothing" * number or "0"} for number in range(5)]


def as_parquet(path, rows=ROWS):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def as_arrow(path, rows=ROWS):
    table = pyarrow.Table.from_pylist(rows)
    with ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)


def as_arrow_file(path):
    table = pyarrow.Table.from_pylist(ROWS)
    with ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=2)


def as_table(path, delimiter):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def as_json(path):
    path.write_text("\n".join(map(json.dumps, ROWS)))


def as_saved(path):
    library.Dataset.from_list(ROWS).save_to_disk(path)


def as_saved_splits(path):
    splits = {"train": library.Dataset.from_list(ROWS), "test": library.Dataset.from_list(ROWS[:1])}
    library.DatasetDict(splits).save_to_disk(path)


FORMATS = {
    "rows.jsonl": as_json,
    "rows.csv": lambda path: as_table(path, ","),
    "rows.tsv": lambda path: as_table(path, "\t"),
    "rows.parquet": as_parquet,
    "rows.arrow": as_arrow,
    "rows_file.arrow": as_arrow_file,
    "saved": as_saved,
    "splits": as_saved_splits,
}


def build(path, name="prompt_answer", /, **args):
    args = {"path": str(path), "max_length": 100, **args}
    return make_dataset(
        DatasetAbstraction(name, args), DatasetUtility(1, 0, 1, byte_tokenizer(chat=name == "chat"))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_in_order(name, tmp_path):
    path = tmp_path / name
    FORMATS[name](path)
    dataset = build(path)
    previews = [dataset.preview(row) for row in range(len(dataset))]
    assert [(one.prompt, *one.answers) for one in previews] == [tuple(row.values()) for row in ROWS]
    assert [one.id for one in previews] == [f"{path.stem}:{number}" for number in range(1, 6)]
    assert len(build(path, max_rows=2)) == 2


CALLS = [
    {"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]},
    {"calls": [{"name": "look", "arguments": {"cities": [{"name": "Rome"}, {"code": 7}]}}]},
]
"""Rows whose objects have different fields; in Arrow they share all of them."""


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "saved", "folder", "splits"])
def test_objects_in_tables_have_the_fields_that_their_author_gave_them(name, tmp_path):
    path, rows = tmp_path / name, library.Dataset.from_list(CALLS)
    if name == "saved":
        rows.save_to_disk(path)
    elif name == "splits":
        library.DatasetDict(train=rows).save_to_disk(path)
    elif name == "folder":
        path.mkdir()
        rows.to_parquet(path / "part.parquet")
    else:
        write = {"rows.parquet": as_parquet, "rows.arrow": as_arrow}[name]
        write(path, CALLS)
    assert [row for *_, row in RowSource(str(path)).rows()] == CALLS


@pytest.mark.parametrize("name", ["rows.parquet", "folder"])
def test_json_in_tables_is_read_as_it_was_written(name, tmp_path):
    rows = [{"calls": [{"a": None}, {"b": [1, "x"]}], "text": "{}"}, {"calls": None, "text": "1"}]
    columns = {"calls": library.List(library.Json()), "text": library.Value("string")}
    path = tmp_path / name
    file = path / "part.parquet" if name == "folder" else path
    file.parent.mkdir(exist_ok=True)
    library.Dataset.from_list(rows, features=library.Features(columns)).to_parquet(file)
    assert [row for *_, row in RowSource(str(path)).rows()] == rows


@pytest.mark.parametrize(
    ("name", "row", "args"),
    [
        ("math_prompts", {"question": "1+1?", "answer": float("nan")}, {}),
        (
            "paired",
            {"prompt": "p", "pos_answers": "a", "neg_answers": "b", "gap": float("nan")},
            {"margin_key": "gap"},
        ),
    ],
)
def test_a_number_that_a_table_lacks_is_refused(name, row, args, tmp_path):
    """`nan` was an answer that no response could give, and a margin that made losses `nan`."""
    as_parquet(tmp_path / "rows.parquet", [row])
    with pytest.raises(DataError, match=r"parquet:1: field .* is (nan, )?not a (finite|list)"):
        build(tmp_path / "rows.parquet", name, **args)


def test_rows_of_csv_are_text_and_located_by_their_first_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"a\nb",007\n\nc,x\n')
    dataset = build(path)
    assert [dataset.preview(row).where.rpartition(":")[2] for row in (0, 1)] == ["2", "5"]
    assert dataset.preview(0).answers == ["007"]
    path.write_text("prompt,answer\na,b\nc,d,e\nf\n")
    with pytest.raises(
        DataError,
        match=r"rows\.csv:3: 3 cells under 2 columns \(2 rows are bad; the others: line 4\)",
    ):
        build(path)
    assert len(build(path, bad_rows="skip")) == 1
    for content, message in (
        (b"prompt,prompt\na,b\n", r"rows\.csv:1: two columns have one name"),
        (b'prompt,answer\n"a"b,c\n', r"rows\.csv:2: not CSV"),
        (b"prompt,answer\n\xff,c\n", r"rows\.csv:\d: not UTF-8"),
        (b"", "holds no rows"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            build(path)


def test_a_cell_of_csv_may_be_as_long_as_a_line_of_json(tmp_path):
    path, text = tmp_path / "rows.csv", "word " * 40_000
    path.write_text(f"text\n{text}\n")
    assert [row for *_, row in RowSource(str(path)).rows()] == [{"text": text}]


@pytest.mark.parametrize(
    "name", ["rows.parquet", "rows.arrow", "saved/state.json", "nowhere.parquet", "nowhere.csv"]
)
def test_an_unreadable_file_is_a_data_error(name, tmp_path):
    path = tmp_path / name
    if not name.startswith("nowhere"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no such thing")
    with pytest.raises(DataError, match="cannot read"):
        build(path.parent if path.name == "state.json" else path)


@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("rows.jsonl.gz", "rows.jsonl.gz is compressed", "files of a folder may be compressed"),
        ("rows.json", "not JSON", "one on each line"),
    ],
)
def test_a_path_of_another_kind_is_refused_with_what_to_do(name, says, hint, tmp_path):
    write = gzip.open if name.endswith("gz") else open
    with write(tmp_path / name, "wt") as file:
        file.write(json.dumps(ROWS[0], indent=2))
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        build(tmp_path / name)
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["ROWS.CSV", "rows.TSV", "Rows.Parquet", "rows.ARROW"])
def test_the_ending_of_a_file_may_be_in_capitals(name, tmp_path):
    FORMATS[name.lower()](tmp_path / name)
    assert len(build(tmp_path / name)) == len(ROWS)


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_a_folder_that_are_not_read_are_named(streaming, tmp_path):
    """The library reads those of one format, and leaves out others without a word."""
    as_json(tmp_path / "a.jsonl")
    as_json(tmp_path / "b.json")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(build(tmp_path, "hf", streaming=streaming).notes) == 1
    as_table(tmp_path / "c.csv", ",")
    _, note = build(tmp_path, "hf", streaming=streaming).notes
    assert note == f"of {tmp_path} only json files are read, not c.csv"


def test_files_of_a_folder_with_other_columns_are_reported_with_these(tmp_path):
    as_json(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "p", "answer": "a", "rank": 1}))
    with pytest.raises(DataError, match=r"not have the same columns: .*1 new columns .*rank"):
        build(tmp_path)


def test_a_missing_split_of_a_folder_of_files_is_reported_with_a_choice(tmp_path):
    as_json(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="dev") as caught:
        build(tmp_path, split="dev")
    assert "choose one of train: " in caught.value.hint


def test_a_missing_split_is_reported_with_the_available_ones(tmp_path):
    as_saved_splits(tmp_path / "splits")
    assert len(build(tmp_path / "splits", split="test")) == 1
    with pytest.raises(DataError, match="it has no split dev, but train, test"):
        build(tmp_path / "splits", split="dev")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_split_of_a_file_is_refused(name, tmp_path):
    """It was ignored, so that an evaluation had the rows of training."""
    path = tmp_path / name
    FORMATS[name](path)
    assert len(build(path, split="train")) == len(ROWS)
    with pytest.raises(DataError, match=f"{name} is one file: it has no split test") as caught:
        build(path, split="test")
    assert "leave split out" in caught.value.hint
    with pytest.raises(DataError, match="cannot read"):
        build(tmp_path / "nowhere", split="test")


def test_a_saved_dataset_is_its_own_split(tmp_path):
    library.Dataset.from_list(ROWS, split="test").save_to_disk(tmp_path / "saved")
    assert len(build(tmp_path / "saved")) == len(build(tmp_path / "saved", split="test")) == 5
    with pytest.raises(DataError, match="it has no split dev"):
        build(tmp_path / "saved", split="dev")


def test_a_folder_may_be_called_like_a_file(tmp_path):
    path = tmp_path / "rows.parquet"
    path.mkdir()
    as_parquet(path / "part-0.parquet")
    assert len(build(path)) == len(ROWS)


def test_tables_are_read_without_torch(tmp_path):
    as_parquet(tmp_path / "rows.parquet")
    script = (
        "import sys; from rlcli.datasets._sources import RowSource; "
        "print(len(list(RowSource(sys.argv[1]).rows())), [name for name in ('torch', "
        "'transformers', 'datasets') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "rows.parquet")]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "5 []\n"


# -- the Hub ---------------------------------------------------------------------------------------


def test_an_unreachable_hub_is_a_data_error(monkeypatch, tmp_path):
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://no-such-host.invalid")
    monkeypatch.setattr("rlcli.datasets._sources.getproxies", dict)
    with pytest.raises(DataError, match="cannot read nobody/nothing from the Hub: ") as caught:
        build("hf:nobody/nothing")
    assert (caught.value.code, caught.value.exit_code) == ("F81", 4)
    assert "reachable" in caught.value.hint
    assert not library.config.HF_HUB_OFFLINE


@pytest.fixture
def hub(monkeypatch):
    """The requests to a fake Hub, which has ROWS."""
    requests = []

    def load_dataset(name, config, *, split, streaming):
        requests.append((name, config, split, streaming))
        return iter(ROWS)

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    return requests


def test_split_and_configuration_are_passed_to_the_hub(hub):
    dataset = build("hf:owner/name", split="test", config="main")
    assert hub == [("owner/name", "main", "test", False)]
    assert (dataset.preview(1).id, dataset.preview(1).where) == ("name:2", "hf:owner/name:2")


def test_only_the_needed_rows_of_a_stream_are_read(hub):
    assert len(build("hf:owner/name", streaming=True, max_rows=3)) == 3
    assert hub[0][-1] is True


# -- hf --------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    ("row", "args", "keys", "prompt"),
    [
        ({"instruction": "q", "output": "a"}, {}, {"packed_input_ids", "prompt_mask"}, "q"),
        ({"instruction": "q", "input": "c", "output": "a"}, {},
         {"packed_input_ids", "prompt_mask"}, "q\n\nc"),
        ({"problem": "q", "solution": "#### 4"}, {}, {"packed_prompts"}, "q"),
        ({"prompt": "q", "other": 1}, {}, {"packed_prompts"}, "q"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {},
         {"packed_input_ids", "prompt_mask", "prompt_lens"}, "q"),
        ({"frage": "q", "antwort": "a"}, {"columns": {"prompt": "frage", "answer": "antwort"}},
         {"packed_input_ids", "prompt_mask"}, "q"),
        ({"prompt": "q", "answer": "a"}, {"kind": "prompt_only"}, {"packed_prompts"}, "q"),
    ],
)  # fmt: skip
def test_the_kind_of_rows_follows_from_their_columns(row, args, keys, prompt, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    dataset = build(tmp_path / "rows.jsonl", "hf", **args)
    assert (set(dataset[0].keys), set(dataset.keys), dataset.preview(0).prompt) == (
        keys,
        keys,
        prompt,
    )


def test_an_instruction_without_an_input_has_null_in_a_table(tmp_path):
    rows = [{"instruction": "q", "input": text, "output": "a"} for text in ("c", None, "")]
    as_parquet(tmp_path / "rows.parquet", rows)
    dataset = build(tmp_path / "rows.parquet", "hf")
    assert [dataset.preview(row).prompt for row in range(3)] == ["q\n\nc", "q", "q"]


def test_conversations_are_read_as_by_the_chat_dataset(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"talk": TALK}]), path)
    tokenizer = byte_tokenizer(chat=True)
    args = {"path": str(path), "columns": {"messages": "talk"}}
    dataset = make_dataset(DatasetAbstraction("hf", args), DatasetUtility(1, 0, 1, tokenizer))
    sample = dataset[0]
    trained = sample.data["packed_input_ids"][~sample.data["prompt_mask"]]
    assert tokenizer.decode(trained.tolist()) == "yo<eos>"
    assert dataset.digest() == build(path, "chat", messages_key="talk", max_length=1024).digest()


def test_unknown_columns_are_reported(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": "x", "b": "y"}')
    with pytest.raises(DataError, match=r"the columns of .* are a, b") as caught:
        build(tmp_path / "rows.jsonl", "hf")
    assert "datasets.train.args.columns.prompt=COLUMN" in caught.value.hint
    with pytest.raises(
        UsageError, match="columns has promt; prompt_answer takes prompt, context, answer"
    ):
        build(tmp_path / "rows.jsonl", "hf", kind="prompt_answer", columns={"promt": "a"})
    with pytest.raises(DataError, match="there is no field 'c'"):
        build(tmp_path / "rows.jsonl", "hf", columns={"prompt": "a", "answer": "c"})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "folder/rows.parquet"])
def test_a_pointer_of_git_lfs_is_reported_as_a_file_that_was_not_fetched(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(LFS_POINTER + b"\noid sha256:4d7a\nsize 12345\n")
    path = file if file.parent == tmp_path else file.parent
    with pytest.raises(DataError, match=f"{file} is a pointer of Git LFS") as caught:
        list(RowSource(str(path)).rows())
    assert "git lfs pull" in caught.value.hint
