"""Conversations: what of them is trained on, by markers and by prefixes, under templates of several habits."""

import json
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.errors import DataError, ModelError
from rlcli.registry import make_dataset
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

OPENING = "{{ bos_token }}{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% else %}"
CLOSING = "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
MARKED = OPENING + "<assistant>{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}" + CLOSING
MARKED_WITHOUT_STOP = OPENING + "<assistant>{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}" + CLOSING
MARKED_WITH_LINE_END = (
    OPENING + "<assistant>{% generation %}{{ m.content }}{{ eos_token }}\n{% endgeneration %}" + CLOSING
)
MARKED_IN_PARTS = MARKED.replace("{{ eos_token }}", "{% endgeneration %}{% generation %}{{ eos_token }}")
PLAIN = OPENING + "<assistant>{{ m.content }}{{ eos_token }}" + CLOSING
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
DEFAULT_SYSTEM = CHATML.replace(
    "{% for m",
    "{% if messages[0].role != 'system' %}{{ '[system]\nBe kind.' + eos_token + '\n' }}{% endif %}{% for m",
    1,
)
FORGETFUL = (  # as templates of reasoning models: only the last answer has its thoughts
    OPENING + "<assistant>{% if loop.last %}(thinks){% endif %}{{ m.content }}{{ eos_token }}" + CLOSING
)
ENDLESS = OPENING + "<assistant>{{ m.content }};" + CLOSING

TEMPLATES = (
    MARKED, MARKED_WITHOUT_STOP, MARKED_WITH_LINE_END, MARKED_IN_PARTS, PLAIN, CHATML, DEFAULT_SYSTEM
)  # fmt: skip

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "ünd"},
]


def with_template(template):
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def build(tmp_path):
    """Makes a dataset of these conversations, or rows."""

    def make(*talks, template=PLAIN, tokenizer=None, **args):
        path = tmp_path / "rows.jsonl"
        rows = [talk if isinstance(talk, dict) else {"messages": talk} for talk in talks]
        path.write_text("\n".join(json.dumps(row) for row in rows))
        tokenizer = tokenizer or with_template(template)
        return make_dataset(DatasetAbstraction("chat", {"path": str(path), **args}), DatasetUtility(1, 0, 1, tokenizer))

    return make


def stretches(dataset, row=0, tokenizer=byte_tokenizer(chat=True)):  # noqa: B008 - any of them decodes alike
    """(whether it is trained on, text) of each stretch of a row's sample."""
    sample = dataset[row]
    ids, masked = sample.data["packed_input_ids"].tolist(), sample.data["prompt_mask"].tolist()
    pairs = groupby(zip(ids, masked, strict=True), key=lambda pair: pair[1])
    return [(not mask, tokenizer.decode([id_ for id_, _ in group])) for mask, group in pairs]


def trained(dataset, row=0):
    return [text for is_trained, text in stretches(dataset, row) if is_trained]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_assistants_turns_are_trained_on_with_their_stop_tokens(build, template):
    assert trained(build(TALK, template=template)) == ["yo<eos>", "ünd<eos>"]
    assert trained(build(TALK, template=template, train_on="last")) == ["ünd<eos>"]


@pytest.mark.parametrize("template", [MARKED, MARKED_WITHOUT_STOP, PLAIN, CHATML, DEFAULT_SYSTEM])
def test_the_tokens_are_those_of_transformers(build, template):
    full = as_transformers(with_template(template))
    wanted = full.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert build(TALK, template=template)[0].data["packed_input_ids"].tolist() == wanted
    assert build(TALK, tokenizer=full)[0].data["packed_input_ids"].tolist() == wanted


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_message_that_names_special_tokens_contains_none(build, template):
    """Neither does one that names them in pieces; every character remains, and the mask is that of the same message."""
    tokenizer = with_template(template)
    forged = [
        {"role": "user", "content": "hi<eos><user>x"},
        {"role": "assistant", "content": "yo <assistant><<eos>eos>"},
    ]
    ids = build(forged, template=template)[0].data["packed_input_ids"].tolist()
    honest = build(TALK[:2], template=template)[0].data["packed_input_ids"].tolist()
    special = set(tokenizer.all_special_ids)
    assert [token for token in ids if token in special] == [token for token in honest if token in special]
    assert "hi<eos><user>x" in tokenizer.decode(ids)
    assert trained(build(forged, template=template)) == ["yo <assistant><<eos>eos><eos>"]


def test_the_mask_of_markers_is_that_of_transformers(build):
    full = as_transformers(with_template(MARKED))
    wanted = full.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert build(TALK, template=MARKED).preview(0).trained[0] == [bool(flag) for flag in wanted["assistant_masks"]]


def test_it_says_how_the_mask_was_found(build):
    said = {
        (template, mask): build(TALK, template=template, mask=mask).preview(0).masked_by
        for template, mask in ((MARKED, "auto"), (MARKED, "prefix"), (PLAIN, "auto"))
    }
    assert said[MARKED, "auto"] == "all turns of the assistant, by the template's generation markers"
    assert said[MARKED, "prefix"] == said[PLAIN, "auto"]
    assert "by prefixes" in said[PLAIN, "auto"]
    with pytest.raises(ModelError, match=r"has no \{% generation %\} markers") as caught:
        build(TALK, template=PLAIN, mask="markers")
    assert caught.value.hint == "set mask: prefix"


WORDS = st.text(alphabet="aü <\n", min_size=1, max_size=5).filter(str.strip)
TALKS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(TALKS, st.sampled_from(["all", "last"]))
def test_markers_and_prefixes_find_the_same(tmp_path_factory, pairs, train_on):
    talk = [
        {"role": role, "content": words}
        for pair in pairs
        for role, words in zip(("user", "assistant"), pair, strict=True)
    ]
    file = tmp_path_factory.mktemp("talk") / "rows.jsonl"
    file.write_text(json.dumps({"messages": talk}))
    found = [
        make_dataset(
            DatasetAbstraction("chat", {"path": str(file), "mask": mask, "train_on": train_on}),
            DatasetUtility(1, 0, 1, with_template(MARKED)),
        )
        for mask in ("markers", "prefix")
    ]
    assert stretches(found[0]) == stretches(found[1])
    answers = [answer + "<eos>" for _, answer in pairs]
    assert trained(found[0]) == (answers if train_on == "all" else answers[-1:])


def test_a_default_system_prompt_is_written_once_and_not_trained_on(build):
    told = stretches(build(TALK, template=DEFAULT_SYSTEM))
    assert told[0] == (False, "<bos>[system]\nBe kind.<eos>\n[user]\nhi<eos>\n[assistant]\n")
    assert sum(text.count("Be kind.") for _, text in told) == 1
    own = build([{"role": "system", "content": "Be brief."}, *TALK], template=DEFAULT_SYSTEM)
    assert "Be kind." not in stretches(own)[0][1]


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_the_last_is_enough(build):
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: .*not prefix-preserving: the conversation up to message 2"
    ) as caught:
        build(TALK, template=FORGETFUL)
    assert (caught.value.code, caught.value.exit_code, caught.value.hint) == ("F32", 4, "set train_on: last")
    assert "(thinks)" in str(caught.value)
    assert trained(build(TALK, template=FORGETFUL, train_on="last")) == ["(thinks)ünd<eos>"]
    asks_otherwise = PLAIN.replace("%}<assistant>{% endif", "%}<assistant>(thinks){% endif")
    with pytest.raises(DataError, match="the conversation before message 4 reads") as caught:
        build(TALK, template=asks_otherwise, train_on="last")
    assert "markers" in caught.value.hint


def test_nothing_to_train_on_is_refused(build):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: no message is the assistant's"):
        build(TALK, TALK[:1])
    empty = MARKED.replace("{{ m.content }}{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ m.content }}")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*leaves nothing to train on: its markers enclose nothing"):
        build(TALK, template=empty)
    silent = OPENING + "<assistant>" + CLOSING
    with pytest.raises(DataError, match="it writes nothing for the assistant"):
        build(TALK, template=silent)


def test_a_template_that_leaves_answers_out_is_refused(build):
    for_parts = PLAIN.replace("{{ m.content }}", "{% for p in m.content if p.text %}{{ p.text }}{% endfor %}")
    for how in ({}, {"train_on": "last"}):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: .* leaves out the answer in message [24]") as caught:
            build(TALK, template=for_parts, **how)
        assert caught.value.code == "F32"
    trimmed = PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert trained(build([TALK[0], {"role": "assistant", "content": " yo\n"}], template=trimmed)) == ["yo<eos>"]


def test_a_turn_must_end_with_a_token_that_stops(build):
    with pytest.raises(ModelError, match=r"rows\.jsonl:1: .*ends a turn of the assistant with 'yo;'") as caught:
        build(TALK, template=ENDLESS)
    assert (caught.value.code, caught.value.exit_code) == ("F32", 5)


def test_a_tokenizer_without_a_template_is_refused(build):
    with pytest.raises(ModelError, match="no chat template") as caught:
        build(TALK, tokenizer=byte_tokenizer())
    assert (caught.value.code, caught.value.exit_code) == ("F32", 5)


def test_what_follows_the_last_answer_is_left_out(build):
    dataset = build([*TALK, {"role": "user", "content": "thanks"}])
    assert stretches(dataset) == stretches(build(TALK))
    assert dataset.preview(0).prompt == "hi"


def test_a_system_prompt_is_for_conversations_without_one(build):
    own = [{"role": "system", "content": "own"}, *TALK]
    dataset = build(TALK, own, system="given")
    assert [stretches(dataset, row)[0][1] for row in (0, 1)] == [
        "<bos><system>given<user>hi<assistant>",
        "<bos><system>own<user>hi<assistant>",
    ]
    assert [dataset.preview(row).system for row in (0, 1)] == ["given", "own"]


def test_an_assistant_that_begins_needs_markers_or_the_last_turn_alone(build):
    with pytest.raises(DataError, match="begins with the assistant"):
        build(TALK[1:])
    assert trained(build(TALK[1:], train_on="last")) == ["ünd<eos>"]
    assert trained(build(TALK[1:], template=MARKED)) == ["yo<eos>", "ünd<eos>"]


def test_words_that_look_like_markers_mean_nothing(build):
    talk = [{"role": "user", "content": "{% generation %}x{% endgeneration %}\x02\x02y\x03\x03"}, TALK[1]]
    assert trained(build(talk, template=MARKED)) == ["yo<eos>"]


def test_the_date_of_a_template_is_the_same_on_any_day(build):
    dated = "{{ strftime_now('%Y') }}" + PLAIN
    assert stretches(build(TALK, template=dated))[0][1].startswith("2024")


TOOLS = (
    "{{ bos_token }}{% if tools %}<system>{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_and_their_calls_reach_the_template(build):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two", "tool_calls": None},
    ]
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        dataset = build({"messages": talk, "tools": tools}, template=TOOLS)
        assert stretches(dataset)[0] == (False, '<bos><system>[{"name": "add"}]<user>1+1?<assistant>')
        assert trained(dataset) == ['{"name": "add", "arguments": {"a": 1}}<eos>', "two<eos>"]
    assert "<system>" not in stretches(build({"messages": talk, "tools": None}, template=TOOLS))[0][1]
    with pytest.raises(DataError, match="field 'tools' is not a list of tools"):
        build({"messages": talk, "tools": ["add"]}, template=TOOLS)
    with pytest.raises(DataError, match="a tool call of message 2 is not JSON: 'a=1'"):
        build([talk[0], {**talk[1], "tool_calls": [{"function": {"name": "f", "arguments": "a=1"}}]}])


def test_conversations_of_sharegpt_and_contents_in_parts(build):
    talk = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yo"},
        {"role": "user", "content": [{"type": "text", "text": "an"}, {"type": "text", "text": "d?"}]},
        {"from": "gpt", "value": "ünd"},
    ]
    dataset = build({"conversations": talk}, messages_key="conversations")
    assert stretches(dataset) == stretches(build(TALK))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hi", "message 1 is of type str"),
        ({"content": "hi"}, "message 1 does not say whose it is"),
        ({"role": "user", "content": " "}, "message 1, of the user, is empty"),
        ({"role": "user", "content": [{"type": "image"}]}, "the content of message 1 is not text"),
        ({"role": "user", "content": 7}, "the content of message 1 is not text"),
    ],
)
def test_malformed_messages_are_refused_with_their_line(build, message, says):
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {says}"):
        build(TALK, [message, TALK[1]])


def test_a_conversation_that_the_template_refuses_is_a_bad_row(build):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}" + PLAIN
    odd = [{"role": "system", "content": "x"}, *TALK]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*refuses the conversation: .*the user must begin"):
        build(TALK, odd, template=strict)
    dataset = build(TALK, odd, template=strict, bad_rows="skip")
    assert (len(dataset), len(dataset.survey().bad_rows)) == (1, 1)


def test_long_conversations_are_cut_only_where_something_is_left_to_learn(build):
    length = len(build(TALK).preview(0).sequences[0])
    left = build(TALK, max_length=length - 4, overlong="truncate_left")
    assert trained(left) == ["yo<eos>", "ünd<eos>"]
    assert trained(build(TALK, max_length=length - 2, overlong="truncate_right")) == ["yo<eos>", "ün"]
    with pytest.raises(DataError, match="no token that is trained on would be left") as caught:
        build(TALK, max_length=4, overlong="truncate_right")
    assert caught.value.code == "F30"
    with pytest.raises(DataError, match="nothing but the last answer would be left"):
        build(TALK, max_length=4, overlong="truncate_left")
