"""Previews and surveys beyond the contract: texts, the order of answers, dropped rows,
and no torch."""

import json
import subprocess
import sys

import pytest

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility, Preview, Survey
from rlcli.registry import load, make_dataset, names, signature
from rlcli.registry.requirements import missing_libraries

ROWS = {
    "prompt_answer": {"prompt": "2+2", "answer": "4"},
    "prompt_only": {"prompt": "2+2"},
    "paired": {"prompt": "2+2", "pos_answers": ["4", "four"], "neg_answers": ["5", "fiver"]},
    "math_prompts": {"question": "What is 6*7?", "answer": "6*7=42\n#### 42"},
}
GENERATED = ("arithmetic", "arithmetic_demonstrations", "tool_demonstrations")


@pytest.fixture(scope="module")
def util():
    return DatasetUtility(1, 0, 1, load("datasets", "arithmetic").make_tokenizer())


def build(name, util, tmp_path, rows=None, **args):
    if name not in GENERATED:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows or [ROWS[name]] * 3))
        args["path"] = str(file)
    return make_dataset(DatasetAbstraction(name, args), util)


def is_installed(name):
    return not any(missing_libraries(signature("datasets", name)))


def test_every_built_in_dataset_has_a_preview():
    classes = {name: load("datasets", name) for name in names("datasets") if is_installed(name)}
    assert [name for name, cls in classes.items() if not hasattr(cls, "preview")] == []


def test_a_preview_has_the_location_and_the_texts_of_a_row(util, tmp_path):
    preview = build("prompt_answer", util, tmp_path, system="be brief").preview(1)
    assert preview.where == f"{tmp_path}/rows.jsonl:2"
    assert (preview.prompt, preview.system, list(preview.answers), preview.chat) == (
        "2+2",
        "be brief",
        ["4"],
        False,
    )


def test_answers_of_pairs_are_in_the_order_of_the_sequences(util, tmp_path):
    preview = build("paired", util, tmp_path).preview(0)
    assert list(preview.answers) == ["4", "5", "four", "fiver"]
    for ids, mask, answer in zip(preview.sequences, preview.trained, preview.answers, strict=True):
        trained = [token for token, flag in zip(ids, mask, strict=True) if flag]
        assert util.tokenizer.decode(trained, skip_special_tokens=True) == answer


def test_a_survey_includes_rows_that_were_left_out(util, tmp_path):
    rows = [{"prompt": "2"}, {"prompt": "2" * 9}, {"bad": 1}, {"prompt": "3"}]
    dataset = build(
        "prompt_only", util, tmp_path, rows, max_length=5, overlong="drop", bad_rows="skip"
    )
    survey = dataset.survey()
    assert len(dataset) == 2
    assert list(survey.lengths) == [2, 10, 2]
    assert survey.too_long == 1
    assert [prompt for _, prompt in survey.prompts] == ["2", "2" * 9, "3"]
    assert survey.bad_rows == [
        f"{tmp_path}/rows.jsonl:3: there is no field 'prompt'; the row has ['bad']"
    ]


def test_a_survey_counts_rows_that_are_too_long():
    assert Survey(lengths=[1, 5, 6], prompts=[], max_length=5, overlong="drop").too_long == 1


def test_an_answered_preview_trains_only_the_answers():
    preview = Preview.answered([1, 2], [[3], [4, 5]], id="x")
    assert preview.sequences == [[1, 2, 3], [1, 2, 4, 5]]
    assert preview.trained == [[False, False, True], [False, False, True, True]]


def test_the_vocabulary_has_the_declared_size():
    arithmetic = load("datasets", "arithmetic")
    assert arithmetic.tokenizer_parts()[0].get_vocab_size() == arithmetic.VOCABULARY


def test_datasets_are_read_without_torch(tmp_path):
    script = f"""
import sys
from rlcli.registry import load
for name in {[*filter(is_installed, names("datasets"))]}:
    load("datasets", name)
import rlcli.api.data, rlcli.api.interface
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
