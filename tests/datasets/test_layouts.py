"""Which dataset reads rows, judged by their columns; and what to do about columns that do not
fit."""

import json

import pytest
import torch

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.datasets._layouts import LAYOUTS, LEARNED_BY, layout_of, remedy
from rlcli.errors import DataError, ModelError, UsageError
from rlcli.registry import make_dataset, names
from rlcli.testing.tokenizer import byte_tokenizer

EVERY_KIND = tuple(LEARNED_BY)
DEMONSTRATIONS = ("chat", "prompt_answer", "plain_text")
PROMPTS = ("math_prompts", "prompt_only")


def test_layouts_are_those_of_datasets_and_recipes():
    assert {layout.kind for layout in LAYOUTS} == set(LEARNED_BY) <= set(names("datasets"))


@pytest.mark.parametrize(
    ("columns", "kinds", "kind"),
    [
        ("question answer", EVERY_KIND, "math_prompts"),
        ("question answer", DEMONSTRATIONS, "prompt_answer"),
        ("prompt answer", EVERY_KIND, "prompt_answer"),
        ("prompt answer", PROMPTS, "math_prompts"),
        ("prompt messages chosen rejected", ("paired",), "paired"),
        ("prompt messages chosen rejected", DEMONSTRATIONS, "chat"),
        ("prompt", DEMONSTRATIONS, None),
        ("title text", EVERY_KIND, "plain_text"),
        ("prompt completion label", EVERY_KIND, "prompt_answer"),
        ("prompt completion label", ("unpaired",), "unpaired"),
        ("prompt chosen rejected", ("unpaired",), "unpaired"),
    ],
)
def test_the_datasets_that_may_read_rows_decide_what_columns_mean(columns, kinds, kind):
    layout = layout_of(columns.split(), kinds, {})
    assert (layout.kind if layout else None) == kind


@pytest.mark.parametrize(
    ("columns", "kinds", "hint"),
    [
        ("a b", EVERY_KIND, None),
        ("prompt chosen", ("paired",), "rows of paired also have neg_answers or rejected"),
        ("prompt chosen rejected", ("paired",), "set a.prompt=prompt a.positive=chosen a.negative"),
        ("prompt anwser", DEMONSTRATIONS, "if anwser is the answer, set a.answer=anwser"),
        ("prompt answers", ("paired",), "rows of paired also have neg_answers or rejected"),
        ("exercise answer id", PROMPTS, "if a column of another name holds that"),
        ("prompt chosen rejected", DEMONSTRATIONS, "rlcli train dpo or rlcli train reward"),
    ],
)
def test_a_remedy_names_columns_or_the_algorithms_for_such_rows(columns, kinds, hint):
    proposed = remedy(columns.split(), kinds, lambda field, column: f"a.{field}={column}")
    assert proposed is hint if hint is None else hint in proposed


def build(path, name, rows, chat=True, **args):
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = byte_tokenizer(chat=chat)
    abstraction = DatasetAbstraction(name, {"path": str(path / "rows.jsonl"), **args})
    return make_dataset(abstraction, DatasetUtility(1, 0, 1, tokenizer))


def test_prompts_of_several_messages_need_a_chat_template(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(ModelError, match="prompts of several messages need a chat template"):
        build(tmp_path, "prompt_only", [{"prompt": messages}], chat=False)
    alone = build(tmp_path, "prompt_only", [{"prompt": messages[1:]}], chat=False)
    assert alone.preview(0).prompt == "Hi"


def test_a_system_prompt_of_the_row_takes_precedence(tmp_path):
    rows = [
        {"prompt": [{"role": "system", "content": "A"}, {"role": "user", "content": "Hi"}]},
        {"prompt": "Hi"},
    ]
    dataset = build(tmp_path, "prompt_only", rows, system="B")
    texts = [byte_tokenizer().decode(dataset.preview(row).sequences[0]) for row in (0, 1)]
    assert texts == [f"<bos><system>{s}<user>Hi<assistant>" for s in "AB"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "Q? A: 1", "rejected": "Q? A: 2", "topic": "Q?"}, "which field is the prompt"),
        ({"chosen": "Q?", "rejected": "Q? A: 2"}, "the row has no prompt"),
        ({"chosen": [{"role": "assistant", "content": "1"}],
          "rejected": [{"role": "assistant", "content": "2"}]}, "no message before the answer"),
        ({"chosen": [{"role": "user", "content": "1"}],
          "rejected": [{"role": "user", "content": "2"}]}, "is not the assistant's"),
    ],
)  # fmt: skip
def test_pairs_whose_prompt_is_unclear_are_refused(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        build(tmp_path, "hf", [row], kind="paired")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "Q? A: 1", "rejected": "Q? A: "}, "rejected has no answer after the prompt"),
        ({"chosen": "Q? ", "rejected": "Q? 1"}, "chosen has no answer after the prompt"),
        ({"prompt": "Q?", "chosen": "1", "rejected": None}, "'rejected' is null, not a list"),
        ({"prompt": "Q?", "chosen": [], "rejected": "1"}, "'chosen' is an empty list"),
    ],
)
def test_a_pair_that_lacks_an_answer_is_refused_for_that(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        build(tmp_path, "hf", [row], kind="paired")


def talk(*contents):
    """A conversation, which the user begins."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"prompt": "Hi", "completion": "Hello", "label": True}, [True]),
        ({"prompt": "Hi", "response": "Hello", "label": "False"}, [False]),
        ({"prompt": talk("Hi"), "completion": talk("Hi", "Hello")[1:], "label": 1}, [True]),
        ({"messages": talk("Hi", "Hello"), "label": 0}, [False]),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "Ho"}, [True, False]),
        ({"prompt": "Hi", "pos_answers": ["Hello", "Hey"], "neg_answers": ["Ho"]},
         [True, True, False]),
        ({"chosen": talk("Hi", "Hello"), "rejected": talk("Hi", "Ho")}, [True, False]),
    ],
)  # fmt: skip
def test_answers_are_judged_alone_wherever_rows_hold_them(tmp_path, row, flags):
    dataset = build(tmp_path, "hf", [row], kind="unpaired")
    preview, sample = dataset.preview(0), dataset[0]
    assert preview.prompt == "Hi"
    if len(flags) > 1:
        assert [answer in ("Hello", "Hey") for answer in preview.answers] == flags
    else:
        assert preview.answers == ["Hello"]
    assert sample.data["desirable"].tolist() == flags
    assert sample.seqlens["desirable"] == [[1] * len(flags)]
    tokens = torch.tensor(preview.sequences[0])
    prompt = tokens[~torch.tensor(preview.trained[0])].tolist()
    assert byte_tokenizer(chat=True).decode(prompt) == "<bos><user>Hi<assistant>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Q", "answer": "A", "label": "good"}, "'label' is 'good', not true or false"),
        ({"prompt": "Q", "answer": "A", "label": 0.5}, "'label' is 0.5, not true or false"),
        ({"prompt": "Q", "answer": "A", "label": None}, "'label' is null, not true or false"),
        (
            {"prompt": "Q", "answer": talk("Q", "A"), "label": True},
            "messages before the answer",
        ),
        ({"messages": talk("Q", "A")[1:], "label": True}, "and so no prompt"),
    ],
)
def test_an_answer_without_a_clear_label_or_prompt_is_refused(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        build(tmp_path, "hf", [row], kind="unpaired")


def test_rows_of_unpaired_answers_have_a_label_or_two_sides(tmp_path):
    row = {"prompt": "Q", "answer": "A", "label": True}
    for keys in (
        {"label_key": None},
        {"positive_key": "good"},
        {"answer_key": None, "label_key": None},
    ):
        with pytest.raises(UsageError, match="rows have an answer and its label"):
            build(tmp_path, "unpaired", [row], **keys)


def test_the_first_row_that_fits_decides_and_bad_rows_can_be_skipped(tmp_path):
    rows = [{"prompt": "no pair"}, {"prompt": "Q", "chosen": "1", "rejected": "2"}]
    dataset = build(tmp_path, "hf", rows, kind="paired", bad_rows="skip")
    assert (len(dataset), dataset.preview(0).answers) == (1, ["1", "2"])
    with pytest.raises(DataError, match="there is no field"):
        build(tmp_path, "hf", rows, kind="paired")


def test_rows_without_columns_and_an_empty_list_of_kinds_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"the columns of .* are none"):
        build(tmp_path, "hf", [{}])
    with pytest.raises(UsageError, match="kind is an empty list"):
        build(tmp_path, "hf", [{"prompt": "Q"}], kind=[])


USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "Hi"), ("assistant", "Yes."), ("assistant", "No."))
)


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ({"id": "a", "prompt": "Q", "completion": "A"}, ""),
        ({"messages": [USER, GOOD], "tools": None, "system": "Rhyme."}, "system"),
        ({"instruction": "Add.", "input": "1+1", "chosen": "2", "rejected": "3"}, "input"),
        ({"text": "T"} | dict.fromkeys("abcdefghij", 1), "a, b, c, d, e, f, g, h, …"),
    ],
)
def test_columns_that_are_not_read_are_named(tmp_path, row, note):
    (says,) = build(tmp_path, "hf", [row]).notes
    assert says.partition(")")[2] == (note and f"; columns that are not read: {note}")


RENAMED = {"task_text": "1+1?", "gold": "2"}


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (PROMPTS, "prompt answer"),
        (PROMPTS, "question answer"),
        (DEMONSTRATIONS, "prompt completion"),
        (DEMONSTRATIONS, "question answer"),
    ],
)
def test_columns_are_named_by_any_usual_name_of_their_fields(tmp_path, kinds, names):
    columns = dict(zip(names.split(), RENAMED, strict=True))
    preview = build(tmp_path, "hf", [RENAMED], kind=list(kinds), columns=columns).preview(0)
    assert preview.prompt == "1+1?"
    assert [*preview.answers, preview.metadata.get("answer")][0] == "2"


VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "answer": "1+1=2 #### 2"},
}


@pytest.mark.parametrize("columns", [{}, {"answer": "extra_info.answer"}])
def test_a_column_may_be_a_field_of_an_object(tmp_path, columns):
    dataset = build(tmp_path, "hf", [VERL], kind=list(PROMPTS), columns=columns)
    assert dataset.preview(0).metadata["answer"] == "2"
    (unread,) = (note.rpartition(": ")[2] for note in dataset.notes)
    assert "reward_model" in unread if columns else unread == "data_source, extra_info"


def test_a_missing_field_of_an_object_is_reported_with_those_that_it_has(tmp_path):
    columns = {"answer": "reward_model.truth"}
    missing = r"no field 'reward_model.truth'.*'reward_model.style'"
    with pytest.raises(DataError, match=missing) as caught:
        build(tmp_path, "hf", [VERL], kind="math_prompts", columns=columns)
    assert caught.value.hint == "did you mean reward_model.ground_truth?"


@pytest.mark.parametrize("row", [VERL, VERL | {"reward_model.ground_truth": "3"}])
def test_a_field_of_an_object_is_reported_once(tmp_path, row):
    args = {"question_key": "problem", "answer_key": "reward_model.ground_truth"}
    with pytest.raises(DataError) as caught:
        build(tmp_path, "math_prompts", [row], **args)
    assert caught.value.what.count("'reward_model.ground_truth'") == 1


def test_a_column_whose_name_has_a_dot_takes_precedence_over_a_field_of_an_object(tmp_path):
    columns = {"answer": "reward_model.ground_truth"}
    row = VERL | {"reward_model.ground_truth": "3"}
    dataset = build(tmp_path, "hf", [row], kind="math_prompts", columns=columns)
    assert dataset.preview(0).metadata["answer"] == "3"


def test_a_single_message_is_not_taken_for_a_list_of_rows(tmp_path):
    with pytest.raises(DataError) as caught:
        build(tmp_path, "hf", [{"said": USER}], kind=list(PROMPTS))
    assert "list of rows" not in caught.value.hint


@pytest.mark.parametrize(
    ("kinds", "columns", "hint"),
    [
        (PROMPTS, {"question": "task_text"}, "rows of math_prompts also have answer: set "),
        (DEMONSTRATIONS, {"prompt": "task_text"}, "rows of prompt_answer also have answer: set "),
        (PROMPTS, {"prompt": "task_text", "chosen": "gold"}, "question and answer; prompt"),
        (PROMPTS, {"prompt": "task_text", "question": "gold"}, "question and answer; prompt"),
    ],
)
def test_names_that_do_not_suffice_are_reported_with_what_is_missing(
    tmp_path, kinds, columns, hint
):
    with pytest.raises(DataError, match=r"the columns of .* are task_text, gold") as caught:
        build(tmp_path, "hf", [RENAMED], kind=list(kinds), columns=columns)
    assert caught.value.where.endswith("rows.jsonl:1")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "row", "args"),
    [
        ("prompt_only", {"prompt": [USER]}, {}),
        ("prompt_answer", {"prompt": [USER], "answer": [GOOD]}, {}),
        ("paired", {"prompt": "Hi", "pos_answers": [GOOD], "neg_answers": [BAD]}, {}),
        ("hf", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ("hf", {"messages": [USER, GOOD], "label": True}, {"kind": "unpaired"}),
    ],
)
def test_messages_may_be_json_texts_as_in_tables(tmp_path, name, row, args):
    written = {
        key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()
    }
    expected, read = (build(tmp_path, name, [each], **args).preview(0) for each in (row, written))
    assert read == expected


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("prompt_answer", {"prompt": [USER], "answer": [GOOD]}),
        ("hf", {"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]}),
        ("hf", {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
    ],
)
def test_a_single_message_needs_no_list(tmp_path, name, row):
    alone = {key: value[0] if isinstance(value, list) else value for key, value in row.items()}
    expected, read = (build(tmp_path, name, [each]).preview(0) for each in (row, alone))
    assert read == expected


@pytest.mark.parametrize(
    "text", ['[{"name": "Ann"}]', '[{"role": "user"', "[1]", "[{}]", "[{" * 9999]
)
def test_other_json_is_a_text(tmp_path, text):
    assert (
        build(tmp_path, "prompt_only", [{"prompt": text}], max_length=99999).preview(0).prompt
        == text
    )
