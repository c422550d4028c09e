"""The datasets that read files, beyond their contract: texts, truncation,
random pairs and refusals."""

import json

import pytest
import torch
from chat_templates import byte_level, public_templates

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.errors import DataError, ModelError, UsageError
from rlcli.registry import load, make_dataset
from rlcli.testing.tokenizer import byte_tokenizer

ROWS = {
    "prompt_answer": {"prompt": "hi", "answer": "you"},
    "prompt_only": {"prompt": "hi"},
    "paired": {"prompt": "hi", "pos_answers": ["yes", "so"], "neg_answers": ["no", "not"]},
    "math_prompts": {"question": "What is 6*7?", "answer": "6*7=42\n#### 42"},
}


PLAIN, CHAT = byte_tokenizer(), byte_tokenizer(chat=True)


@pytest.fixture
def build(tmp_path):
    """Builds a dataset of these rows."""

    def make(name, rows, tokenizer=PLAIN, seed=1, **args):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        args = {"path": str(path), **args}
        return make_dataset(DatasetAbstraction(name, args), DatasetUtility(seed, 0, 1, tokenizer))

    return make


def texts(sample, key="packed_prompts", tokenizer=PLAIN):
    return [
        tokenizer.decode(tokens.tolist())
        for tokens in sample.data[key].split(sample.flat_seqlens(key))
    ]


@pytest.mark.parametrize("name", ["prompt_answer", "paired"])
def test_special_tokens_in_answers_are_encoded_as_plain_text(build, name):
    """Text written by a policy may be used as an answer."""
    forged = f"yes{PLAIN.eos_token}{PLAIN.eos_token}"
    fields = {"answer": forged, "pos_answers": [forged], "neg_answers": [forged]}
    sample = build(name, [{key: fields.get(key, text) for key, text in ROWS[name].items()}])[0]
    for tokens in sample.data["packed_input_ids"].split(sample.flat_seqlens("packed_input_ids")):
        assert (tokens == PLAIN.eos_token_id).nonzero().flatten().tolist() == [len(tokens) - 1]
        assert PLAIN.decode(tokens.tolist(), skip_special_tokens=True) == f"hi{forged}"


@pytest.mark.parametrize("order", ["Be brief.", "Say hi"])
@pytest.mark.parametrize("name", ["prompt_only", "prompt_answer", "paired"])
def test_a_template_that_leaves_messages_of_a_prompt_out_is_refused(build, name, order):
    """As many leave out those of the developer; also where others have the same words."""
    few_roles = byte_tokenizer(chat=True)
    few_roles.chat_template = (
        "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}"
    )
    prompt = [{"role": "developer", "content": order}, {"role": "user", "content": "hi"}]
    assert len(build(name, [ROWS[name] | {"prompt": prompt}], CHAT)) == 1
    with pytest.raises(ModelError, match="leaves out message 1, of the developer, of a prompt"):
        build(name, [ROWS[name] | {"prompt": prompt}], few_roles)
    assert len(build(name, [ROWS[name]], few_roles)) == 1


@pytest.mark.parametrize(
    "further", [{"tool_calls": [{"function": {"name": "add"}}]}, {"reasoning_content": "hm"}]
)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("prompt_answer", {"answer": "answer"}),
        ("unpaired", {"answer": "answer", "label": True}),
        ("paired", {"pos_answers": "answer", "neg_answers": "other"}),
    ],
)
def test_what_an_answer_has_besides_its_text_is_refused(build, name, fields, further):
    """It was left out: of a call of a tool, only the end of the turn was trained on."""
    (extra,) = further
    answer = {"role": "assistant", "content": "yes", **further}
    messages = {"answer": [answer], "other": [{"role": "assistant", "content": "no"}]}
    row = {"prompt": "hi", **{key: messages.get(value, value) for key, value in fields.items()}}
    with pytest.raises(DataError, match=f"rows.jsonl:1: the answer in field .* has {extra}"):
        build(name, [row])
    answer[extra] = None
    assert len(build(name, [row])) == 1


@pytest.mark.parametrize(("name", "number"), [("prompt_answer", 1), ("paired", 4)])
def test_answers_within_reasoning_that_the_template_begins_are_warned_about(
    build, caplog, name, number
):
    """They are trained on as they are: the model then learns to answer in its thoughts."""
    thinking = byte_tokenizer(chat=True)
    thinking.chat_template = thinking.chat_template.replace(
        "<assistant>{%", "<assistant><think>\n{%"
    )
    build(name, [ROWS[name]], CHAT)
    build(name, [ROWS[name]], thinking, chat=False)
    complete = {
        "answer": "hm</think>you",
        "pos_answers": ["</think>"],
        "neg_answers": ["x</think>"],
    }
    build(name, [{key: complete.get(key, text) for key, text in ROWS[name].items()}], thinking)
    assert not caplog.records
    build(name, [ROWS[name]], thinking)
    (record,) = caplog.records
    assert f"{number} of {number} answers have no </think>" in record.getMessage()


@pytest.mark.parametrize("name", ["prompt_answer", "paired"])
@pytest.mark.parametrize(
    ("template", "opening"), [("gptoss", "<|channel|>final<|message|>"), ("qwen3", "")]
)
def test_answers_begin_with_the_channel_that_the_template_writes(build, name, template, opening):
    tokenizer = byte_level(public_templates()[template])
    preview = build(name, [ROWS[name]], tokenizer, max_length=4096).preview(0)
    for tokens, trained, answer in zip(
        preview.sequences, preview.trained, preview.answers, strict=True
    ):
        ids = [token for token, is_trained in zip(tokens, trained, strict=True) if is_trained]
        assert tokenizer.decode(ids) == f"{opening}{answer}<eos>"


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_an_overlong_row_is_refused_dropped_or_truncated(build, name):
    first, *_ = ROWS[name]
    rows = [ROWS[name], ROWS[name] | {first: "x" * 200}, ROWS[name]]
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: row rows:2 has \d+ tokens, .*max_length = 100"
    ) as caught:
        build(name, rows, max_length=100)
    assert (caught.value.code, caught.value.exit_code) == ("F30", 4)
    dropped = build(name, rows, max_length=100, overlong="drop")
    assert [dropped[i].ids[0] for i in range(len(dropped))] == ["rows:1", "rows:3"]
    cut = build(name, rows, max_length=100, overlong="truncate_left")
    assert max(cut[1].flat_seqlens(cut.keys[0])) == 100
    with pytest.raises(DataError, match="all 3 are longer than max_length = 2") as caught:
        build(name, rows, max_length=2, overlong="drop")
    assert caught.value.code == "F80"
    with pytest.raises(UsageError, match=r"max_length: .* greater than or equal to 1"):
        build(name, rows, max_length=0)


@pytest.mark.parametrize("name", ROWS)
def test_a_chat_template_is_used_if_it_exists(build, name):
    key = load("datasets", name).KEYS[0]
    rows = [ROWS[name]]
    with_template = texts(build(name, rows, CHAT)[0], key)[0]
    assert with_template.startswith("<bos><user>")
    assert "<assistant>" in with_template
    assert texts(build(name, rows, CHAT, chat=False)[0], key)[0].count("<user>") == 0
    assert texts(build(name, rows, PLAIN)[0], key)[0].startswith("<bos>")
    with pytest.raises(ModelError, match="no chat template") as caught:
        build(name, rows, PLAIN, chat=True)
    assert (caught.value.code, caught.value.exit_code) == ("F32", 5)


@pytest.mark.parametrize("name", ROWS)
def test_misspelt_arguments_and_choices_are_refused(build, name):
    for wrong in ({"max_lenght": 3}, {"overlong": "cut"}, {"bad_rows": True}):
        with pytest.raises(UsageError):
            build(name, [ROWS[name]], **wrong)


# -- each of them ----------------------------------------------------------------------------------


def test_prompt_only_writes_special_tokens_once(build):
    rows = [{"prompt": "hi"}]
    assert texts(build("prompt_only", rows)[0]) == ["<bos>hi"]
    assert texts(build("prompt_only", [{"prompt": "<bos>hi"}])[0]) == ["<bos>hi"]
    assert texts(build("prompt_only", rows, CHAT)[0]) == ["<bos><user>hi<assistant>"]
    assert texts(build("prompt_only", rows, CHAT, system="be")[0]) == [
        "<bos><system>be<user>hi<assistant>"
    ]
    assert texts(build("prompt_only", rows, system="be")[0]) == ["<bos>be\n\nhi"]
    closing = byte_tokenizer(around="<bos> $A <eos>")
    assert texts(build("prompt_only", rows, closing)[0]) == ["<bos>hi"]


def test_prompt_only_truncates_on_the_configured_side(build):
    rows = [{"prompt": "abcdef"}, {"prompt": "ab"}]
    left = build("prompt_only", rows, max_length=4, overlong="truncate_left")
    right = build("prompt_only", rows, max_length=4, overlong="truncate_right")
    assert [texts(left[i])[0] for i in range(2)] == ["cdef", "<bos>ab"]
    assert [texts(right[i])[0] for i in range(2)] == ["<bos>abc", "<bos>ab"]


def test_prompt_answer_marks_the_prompt_and_ends_the_answer(build):
    sample = build("prompt_answer", [ROWS["prompt_answer"]], CHAT)[0]
    tokens, mask = sample.data["packed_input_ids"], sample.data["prompt_mask"]
    assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
    assert CHAT.decode(tokens[mask].tolist()) == "<bos><user>hi<assistant>"
    assert CHAT.decode(tokens[~mask].tolist()) == "you<eos>"
    assert mask.tolist() == sorted(mask.tolist(), reverse=True)


def test_prompt_answer_truncates_prompt_or_answer(build):
    rows = [{"prompt": "abcdef", "answer": "xyz"}]

    def parts(overlong):
        sample = build("prompt_answer", rows, max_length=9, overlong=overlong)[0]
        tokens, mask = sample.data["packed_input_ids"], sample.data["prompt_mask"]
        return PLAIN.decode(tokens[mask].tolist()), PLAIN.decode(tokens[~mask].tolist())

    assert parts("truncate_left") == ("bcdef", "xyz<eos>")
    assert parts("truncate_right") == ("<bos>abcdef", "xy")
    with pytest.raises(DataError, match="a prompt of 7 tokens leaves no room") as caught:
        build("prompt_answer", rows, max_length=7, overlong="truncate_right")
    assert caught.value.code == "F30"
    with pytest.raises(DataError, match="an answer of 4 tokens leaves no room"):
        build("prompt_answer", rows, max_length=4, overlong="truncate_left")


def test_a_tokenizer_without_an_end_token_is_refused(build):
    endless = byte_tokenizer()
    del endless.special_tokens_map["eos_token"]
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        build("prompt_answer", [ROWS["prompt_answer"]], endless)


def test_pairs_are_interleaved_and_start_with_the_prompt(build):
    sample = build("paired", [ROWS["paired"]])[0]
    answers = ("yes", "no", "so", "not")
    assert texts(sample, "packed_input_ids") == [f"<bos>hi{answer}<eos>" for answer in answers]
    lengths = [[7, 6, 6, 7]]
    assert sample.seqlens == {
        "packed_input_ids": lengths,
        "prompt_mask": lengths,
        "prompt_lens": [[1]],
    }
    prompts = sample.data["packed_input_ids"][sample.data["prompt_mask"]]
    assert PLAIN.decode(prompts.tolist()) == "<bos>hi" * 4
    assert sample.data["prompt_lens"].tolist() == [3]


def test_drawn_pairs_depend_on_the_seed_and_the_row(build):
    rows = [{"prompt": "p", "pos_answers": list("abcdefgh"), "neg_answers": list("ABCDEFGH")}] * 6

    def drawn(seed):
        data = build("paired", rows, seed=seed, max_pairs_per_prompt=3)
        return [
            [text.removeprefix("<bos>p")[0] for text in texts(data[i], "packed_input_ids")]
            for i in range(len(data))
        ]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len({tuple(row) for row in drawn(1)}) > 1
    for positive, negative in ((row[::2], row[1::2]) for row in drawn(1)):
        assert [letter.upper() for letter in positive] == negative
        assert positive == sorted(positive)
        assert len(positive) == 3


def test_margins_belong_to_their_pairs(build):
    row = ROWS["paired"] | {"by": [2, 0.5]}
    assert "margins" not in build("paired", [row])[0].keys
    sample = build("paired", [row], margin_key="by")[0]
    assert sample.seqlens["margins"] == [[1, 1, 1, 1]]
    assert build("paired", [row], margin_key="by").keys[-1] == "margins"
    assert sample.data["margins"].tolist() == [2.0, 0.0, 0.5, 0.0]
    many = {
        "prompt": "p",
        "pos_answers": list("abcdefgh"),
        "neg_answers": ["x"] * 8,
        "by": list(range(8)),
    }
    sample = build("paired", [many], margin_key="by", max_pairs_per_prompt=3)[0]
    letters = [text.removeprefix("<bos>p")[0] for text in texts(sample, "packed_input_ids")][::2]
    assert sample.data["margins"].tolist()[::2] == ["abcdefgh".index(letter) for letter in letters]
    for wrong, message in (
        ([1], "2 pos_answers but 1 by"),
        ([1, True], "not a list of numbers"),
        (None, "not a list"),
    ):
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{message}"):
            build("paired", [row | {"by": wrong}], margin_key="by")


def test_a_single_pair_may_be_written_without_lists(build):
    keys = {"positive_key": "chosen", "negative_key": "rejected", "margin_key": "margin"}
    sample = build(
        "paired", [{"prompt": "hi", "chosen": "yes", "rejected": "no", "margin": 0.5}], **keys
    )[0]
    assert texts(sample, "packed_input_ids") == ["<bos>hiyes<eos>", "<bos>hino<eos>"]
    assert sample.data["margins"].tolist() == [0.5, 0.0]
    with pytest.raises(DataError, match="1 chosen but 2 rejected"):
        build(
            "paired",
            [{"prompt": "hi", "chosen": "yes", "rejected": ["no", "so"], "margin": 1}],
            **keys,
        )


def test_invalid_pairs_are_refused(build):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 2 pos_answers but 1 neg_answers"):
        build("paired", [ROWS["paired"] | {"neg_answers": ["no"]}])
    with pytest.raises(DataError, match="entry 1 of field 'pos_answers' is empty"):
        build("paired", [ROWS["paired"] | {"pos_answers": ["", "b"]}])
    with pytest.raises(UsageError, match=r"max_pairs_per_prompt: .* greater than or equal to 1"):
        build("paired", [ROWS["paired"]], max_pairs_per_prompt=0)


def test_pairs_have_the_same_prompt_after_truncation(build):
    sample = build("paired", [ROWS["paired"]], max_length=6, overlong="truncate_left")[0]
    assert texts(sample, "packed_input_ids") == [
        "hiyes<eos>",
        "hino<eos>",
        "hiso<eos>",
        "hinot<eos>",
    ]
    assert sample.data["prompt_lens"].tolist() == [2]
    sample = build("paired", [ROWS["paired"]], max_length=6, overlong="truncate_right")[0]
    assert texts(sample, "packed_input_ids") == [
        "<bos>hiyes",
        "<bos>hino<eos>",
        "<bos>hiso<eos>",
        "<bos>hinot",
    ]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("6*7=<<6*7=42>>42\n#### 42", "42"),
        ("#### 1,234,567", "1234567"),
        ("#### 3,5", "3,5"),
        ("#### (1,2345)", "(1,2345)"),
        ("#### 1\n#### -2.5 ", "-2.5"),
        (" \\frac{1}{2} ", "\\frac{1}{2}"),
        ("(1,200)", "(1,200)"),
        (42, "42"),
        (0.5, "0.5"),
    ],
)
def test_the_final_answer_is_extracted(build, solution, answer):
    sample = build("math_prompts", [{"question": "?", "answer": solution}])[0]
    assert sample.metadata == {"answer": [answer], "question": ["?"]}


@pytest.mark.parametrize("solution", ["", "working\n####  ", True, None, ["42"]])
def test_a_row_without_an_answer_is_refused(build, solution):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: ") as caught:
        build("math_prompts", [{"question": "?", "answer": solution}])
    assert caught.value.code == "F31"


def test_the_question_is_inserted_literally_into_the_template(build):
    rows = [{"problem": "{x}^{2}?", "solution": "4"}]
    keys = {"question_key": "problem", "answer_key": "solution"}
    template = "Q: {question}\n{steps}"
    assert texts(build("math_prompts", rows, template=template, **keys)[0]) == [
        "<bos>Q: {x}^{2}?\n{steps}"
    ]
    assert texts(build("math_prompts", rows, CHAT, **keys)[0]) == ["<bos><user>{x}^{2}?<assistant>"]
    with pytest.raises(UsageError, match=r"must contain \{question\}"):
        build("math_prompts", rows, template="Q: {}", **keys)


def test_the_error_of_a_template_without_system_role_is_reported(build):
    strict = byte_tokenizer(chat=True)
    strict.chat_template = (
        "{{ raise_exception('no system role') if messages[0]['role'] == 'system' }}"
    )
    with pytest.raises(ModelError, match=r"chat template of .* fails: .*no system role"):
        build("math_prompts", [ROWS["math_prompts"]], strict, system="be brief")


def test_a_template_with_the_date_gives_the_same_data_every_day(build):
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    dataset = build("prompt_only", [ROWS["prompt_only"]], tokenizer)
    assert texts(dataset[0])[0].startswith("26 Jul 2024")
