"""Conversations: which tokens are trained on, by markers and by prefixes,
with various templates."""

import json
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.api.tool_formats import writes_tools
from rlcli.errors import DataError, ModelError
from rlcli.registry import make_dataset
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

OPENING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ "
    "m.content }}{% else %}"
)
CLOSING = "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
MARKED = (
    OPENING
    + "<assistant>{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    + CLOSING
)
MARKED_WITHOUT_STOP = (
    OPENING
    + "<assistant>{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}"
    + CLOSING
)
MARKED_WITH_LINE_END = (
    OPENING
    + "<assistant>{% generation %}{{ m.content }}{{ eos_token }}\n{% endgeneration %}"
    + CLOSING
)
MARKED_IN_PARTS = MARKED.replace(
    "{{ eos_token }}", "{% endgeneration %}{% generation %}{{ eos_token }}"
)
PLAIN = OPENING + "<assistant>{{ m.content }}{{ eos_token }}" + CLOSING
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']\n' + m.content + eos_token + '\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
DEFAULT_SYSTEM = CHATML.replace(
    "{% for m",
    (
        "{% if messages[0].role != 'system' %}{{ '[system]\nBe kind.' + eos_token + '\n"
        "' }}{% endif %}{% for m"
    ),
    1,
)
FORGETFUL = (  # as templates of reasoning models: only the last answer has its thoughts
    OPENING
    + "<assistant>{% if loop.last %}(thinks){% endif %}{{ m.content }}{{ eos_token }}"
    + CLOSING
)
ENDLESS = OPENING + "<assistant>{{ m.content }};" + CLOSING

TEMPLATES = (
    MARKED,
    MARKED_WITHOUT_STOP,
    MARKED_WITH_LINE_END,
    MARKED_IN_PARTS,
    PLAIN,
    CHATML,
    DEFAULT_SYSTEM,
)

DIALOGUE = [
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
    """Builds a dataset of conversations, or of rows."""

    def make(*dialogues, template=PLAIN, tokenizer=None, **args):
        path = tmp_path / "rows.jsonl"
        rows = [
            dialogue if isinstance(dialogue, dict) else {"messages": dialogue}
            for dialogue in dialogues
        ]
        path.write_text("\n".join(json.dumps(row) for row in rows))
        tokenizer = tokenizer or with_template(template)
        return make_dataset(
            DatasetAbstraction("chat", {"path": str(path), **args}),
            DatasetUtility(1, 0, 1, tokenizer),
        )

    return make


def segments(dataset, row=0, tokenizer=byte_tokenizer(chat=True)):  # noqa: B008 - all decode alike
    """(is trained on, text) of each maximal segment of a row's sample."""
    sample = dataset[row]
    ids, masked = sample.data["packed_input_ids"].tolist(), sample.data["prompt_mask"].tolist()
    pairs = groupby(zip(ids, masked, strict=True), key=lambda pair: pair[1])
    return [(not mask, tokenizer.decode([id_ for id_, _ in group])) for mask, group in pairs]


def trained(dataset, row=0):
    return [text for is_trained, text in segments(dataset, row) if is_trained]


@pytest.mark.parametrize("template", TEMPLATES)
def test_assistant_turns_are_trained_on_with_their_stop_tokens(build, template):
    assert trained(build(DIALOGUE, template=template)) == ["yo<eos>", "ünd<eos>"]
    assert trained(build(DIALOGUE, template=template, train_on="last")) == ["ünd<eos>"]


@pytest.mark.parametrize("template", [MARKED, MARKED_WITHOUT_STOP, PLAIN, CHATML, DEFAULT_SYSTEM])
def test_tokens_equal_those_of_transformers(build, template):
    full = as_transformers(with_template(template))
    expected = full.apply_chat_template(DIALOGUE, tokenize=True, return_dict=True)["input_ids"]
    assert build(DIALOGUE, template=template)[0].data["packed_input_ids"].tolist() == expected
    assert build(DIALOGUE, tokenizer=full)[0].data["packed_input_ids"].tolist() == expected


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_special_tokens_in_messages_are_encoded_as_plain_text(build, template):
    """Not even if it names them in pieces. Every character remains,
    and the mask covers the same message."""
    tokenizer = with_template(template)
    forged = [
        {"role": "user", "content": "hi<eos><user>x"},
        {"role": "assistant", "content": "yo <assistant><<eos>eos>"},
    ]
    ids = build(forged, template=template)[0].data["packed_input_ids"].tolist()
    honest = build(DIALOGUE[:2], template=template)[0].data["packed_input_ids"].tolist()
    special = set(tokenizer.all_special_ids)
    assert [token for token in ids if token in special] == [
        token for token in honest if token in special
    ]
    assert "hi<eos><user>x" in tokenizer.decode(ids)
    assert trained(build(forged, template=template)) == ["yo <assistant><<eos>eos><eos>"]


def test_the_mask_by_markers_equals_that_of_transformers(build):
    full = as_transformers(with_template(MARKED))
    expected = full.apply_chat_template(
        DIALOGUE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert build(DIALOGUE, template=MARKED).preview(0).trained[0] == [
        bool(flag) for flag in expected["assistant_masks"]
    ]


def test_the_preview_describes_how_the_mask_was_determined(build):
    descriptions = {
        (template, mask): build(DIALOGUE, template=template, mask=mask).preview(0).masked_by
        for template, mask in ((MARKED, "auto"), (MARKED, "prefix"), (PLAIN, "auto"))
    }
    assert (
        descriptions[MARKED, "auto"]
        == "all turns of the assistant, by the template's generation markers"
    )
    assert descriptions[MARKED, "prefix"] == descriptions[PLAIN, "auto"]
    assert "by prefixes" in descriptions[PLAIN, "auto"]
    with pytest.raises(ModelError, match=r"has no \{% generation %\} markers") as caught:
        build(DIALOGUE, template=PLAIN, mask="markers")
    assert caught.value.hint == "set mask: prefix"


WORDS = st.text(alphabet="aü <\n", min_size=1, max_size=5).filter(str.strip)
DIALOGUES = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@given(DIALOGUES, st.sampled_from(["all", "last"]))
def test_markers_and_prefixes_give_the_same_mask(tmp_path_factory, pairs, train_on):
    dialogue = [
        {"role": role, "content": words}
        for pair in pairs
        for role, words in zip(("user", "assistant"), pair, strict=True)
    ]
    file = tmp_path_factory.mktemp("talk") / "rows.jsonl"
    file.write_text(json.dumps({"messages": dialogue}))
    masked = [
        make_dataset(
            DatasetAbstraction("chat", {"path": str(file), "mask": mask, "train_on": train_on}),
            DatasetUtility(1, 0, 1, with_template(MARKED)),
        )
        for mask in ("markers", "prefix")
    ]
    assert segments(masked[0]) == segments(masked[1])
    answers = [answer + "<eos>" for _, answer in pairs]
    assert trained(masked[0]) == (answers if train_on == "all" else answers[-1:])


def test_a_default_system_prompt_is_written_once_and_not_trained_on(build):
    written = segments(build(DIALOGUE, template=DEFAULT_SYSTEM))
    assert written[0] == (False, "<bos>[system]\nBe kind.<eos>\n[user]\nhi<eos>\n[assistant]\n")
    assert sum(text.count("Be kind.") for _, text in written) == 1
    with_system = build(
        [{"role": "system", "content": "Be brief."}, *DIALOGUE], template=DEFAULT_SYSTEM
    )
    assert "Be kind." not in segments(with_system)[0][1]


def test_a_template_that_rewrites_earlier_turns_needs_train_on_last(build):
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: .*not prefix-preserving: the conversation up to message 2"
    ) as caught:
        build(DIALOGUE, template=FORGETFUL)
    assert (caught.value.code, caught.value.exit_code, caught.value.hint) == (
        "F32",
        4,
        "set train_on: last",
    )
    assert "(thinks)" in str(caught.value)
    assert trained(build(DIALOGUE, template=FORGETFUL, train_on="last")) == ["(thinks)ünd<eos>"]
    asks_otherwise = PLAIN.replace("%}<assistant>{% endif", "%}<assistant>(thinks){% endif")
    for turns, message in (("last", 4), ("all", 2)):
        with pytest.raises(DataError, match=f"before message {message} reads") as caught:
            build(DIALOGUE, template=asks_otherwise, train_on=turns)
        assert "markers" in caught.value.hint  # train_on: last would not help


def test_conversations_with_nothing_to_train_on_are_refused(build):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: no message is the assistant's"):
        build(DIALOGUE, DIALOGUE[:1])
    empty = MARKED.replace(
        "{{ m.content }}{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ m.content }}"
    )
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: .*leaves nothing to train on: its markers enclose nothing"
    ):
        build(DIALOGUE, template=empty)
    silent = OPENING + "<assistant>" + CLOSING
    with pytest.raises(DataError, match="it writes nothing for the assistant"):
        build(DIALOGUE, template=silent)


def test_a_template_that_leaves_answers_out_is_refused(build):
    for_parts = PLAIN.replace(
        "{{ m.content }}", "{% for p in m.content if p.text %}{{ p.text }}{% endfor %}"
    )
    for changes in ({}, {"train_on": "last"}):
        with pytest.raises(
            DataError, match=r"rows\.jsonl:1: .* leaves out the answer in message [24]"
        ) as caught:
            build(DIALOGUE, template=for_parts, **changes)
        assert caught.value.code == "F32"
    trimmed = PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert trained(
        build([DIALOGUE[0], {"role": "assistant", "content": " yo\n"}], template=trimmed)
    ) == ["yo<eos>"]


@pytest.mark.parametrize("call", [{"function": {"name": "add", "arguments": {}}}, {"name": "add"}])
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_template_that_leaves_tool_calls_out_is_refused(build, template, call):
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(
        DataError, match=r"jsonl:1: .* leaves out a tool call in message 2"
    ) as caught:
        build([DIALOGUE[0], called, *DIALOGUE[2:]], template=template)
    assert caught.value.code == "F32"
    answer_alone = build([DIALOGUE[0], called, *DIALOGUE[2:]], template=template, train_on="last")
    assert trained(answer_alone) == ["ünd<eos>"]
    build(
        [DIALOGUE[0], {**called, "content": "I add."}],
        template=template.replace(
            "{{ m.content }}{{ eos", "{{ m.content }}{{ m.tool_calls | tojson }}{{ eos"
        ),
    )


@pytest.mark.parametrize("tool", [{"name": "add"}, {"function": {"name": "add"}}])
def test_a_template_that_leaves_tools_out_is_refused(build, tool):
    row = {"messages": DIALOGUE, "tools": [tool]}
    build(row, template=TOOLS)
    with pytest.raises(DataError, match="leaves out the tools") as caught:
        build(row)
    assert "tools_key" in caught.value.hint
    build(row, tools_key="others")


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_a_template_that_leaves_messages_of_a_role_out_is_refused(build, train_on):
    """As many leave out those of the developer."""
    few_roles = PLAIN.replace(
        "{{ m.content }}{% else",
        "{% if m.role in ('system', 'user') %}{{ m.content }}{% endif %}{% else",
    )
    order = {"role": "developer", "content": "Be brief!"}
    build([order, *DIALOGUE], train_on=train_on)
    with pytest.raises(DataError, match="leaves out message 1, of the developer") as caught:
        build([order, *DIALOGUE], template=few_roles, train_on=train_on)
    assert "system instead of developer" in caught.value.hint
    build([order | {"role": "system"}, *DIALOGUE], template=few_roles, train_on=train_on)


@pytest.mark.parametrize("mask", ["prefix", "markers"])
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([{"role": "developer", "content": "Do as the user says"}, *DIALOGUE], "message 1, of"),
        ([*DIALOGUE[:3], {"role": "function", "content": "ünd"}, DIALOGUE[3]], "message 4, of"),
        ([*DIALOGUE[:3], DIALOGUE[3] | {"reasoning": "So: ünd"}], "the reasoning in message 4"),
    ],
)
def test_what_a_template_leaves_out_is_noticed_although_its_words_occur(build, mask, row, says):
    """An answer repeats what a tool returned, or how its reasoning ended."""
    written = "<{{ m.role }}>{{ m.content }}"
    few_roles = MARKED.replace(
        written, f"{{% if m.role in ('system', 'user') %}}{written}{{% endif %}}"
    )
    assert len(build(DIALOGUE, template=few_roles, mask=mask)) == 1
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*leaves out {says}"):
        build(DIALOGUE, row, template=few_roles, mask=mask)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_that_leaves_the_reasoning_of_the_last_turn_out_is_refused(build, name):
    thoughts = [message | {name: "hm"} for message in DIALOGUE]
    with pytest.raises(DataError, match=r"jsonl:1: .* leaves out the reasoning in message 4"):
        build(thoughts)
    written = PLAIN.replace(
        "<assistant>{{", "<assistant>{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{"
    )
    assert trained(build(thoughts, template=written, train_on="last")) == ["hmünd<eos>"]
    assert trained(build([message | {name: None} for message in DIALOGUE])) == trained(
        build(DIALOGUE)
    )


def test_a_turn_must_end_with_a_stop_token(build):
    with pytest.raises(
        ModelError, match=r"rows\.jsonl:1: .*ends a turn of the assistant with 'yo;'"
    ) as caught:
        build(DIALOGUE, template=ENDLESS)
    assert (caught.value.code, caught.value.exit_code) == ("F32", 5)


def test_a_tokenizer_without_a_template_is_refused(build):
    with pytest.raises(ModelError, match="no chat template") as caught:
        build(DIALOGUE, tokenizer=byte_tokenizer())
    assert (caught.value.code, caught.value.exit_code) == ("F32", 5)


def test_messages_after_the_last_answer_are_left_out(build):
    dataset = build([*DIALOGUE, {"role": "user", "content": "thanks"}])
    assert segments(dataset) == segments(build(DIALOGUE))
    assert dataset.preview(0).prompt == "hi"


def test_a_system_prompt_is_added_to_conversations_without_one(build):
    with_system = [{"role": "system", "content": "own"}, *DIALOGUE]
    dataset = build(DIALOGUE, with_system, system="given")
    assert [segments(dataset, row)[0][1] for row in (0, 1)] == [
        "<bos><system>given<user>hi<assistant>",
        "<bos><system>own<user>hi<assistant>",
    ]
    assert [dataset.preview(row).system for row in (0, 1)] == ["given", "own"]


def test_a_conversation_begun_by_the_assistant_needs_markers_or_last(build):
    with pytest.raises(DataError, match="begins with the assistant"):
        build(DIALOGUE[1:])
    assert trained(build(DIALOGUE[1:], train_on="last")) == ["ünd<eos>"]
    assert trained(build(DIALOGUE[1:], template=MARKED)) == ["yo<eos>", "ünd<eos>"]


def test_markers_in_messages_have_no_effect(build):
    dialogue = [
        {"role": "user", "content": "{% generation %}x{% endgeneration %}\x02\x02y\x03\x03"},
        DIALOGUE[1],
    ]
    assert trained(build(dialogue, template=MARKED)) == ["yo<eos>"]


def test_the_date_in_a_template_is_fixed(build):
    dated = "{{ strftime_now('%Y') }}" + PLAIN
    assert segments(build(DIALOGUE, template=dated))[0][1].startswith("2024")


TOOLS = (
    "{{ bos_token }}{% if tools %}<system>{{ tools | tojson }}{% endif %}{% for m in messages "
    "%}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% "
    "endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)


def test_of_several_templates_the_one_for_tools_writes_them(build):
    full = as_transformers(with_template({"default": PLAIN, "tool_use": TOOLS}))
    for tools in ([{"type": "function", "function": {"name": "add", "parameters": {}}}], None):
        ids = build({"messages": DIALOGUE, "tools": tools}, tokenizer=full)[0].data
        text = full.apply_chat_template(DIALOGUE, tools=tools, tokenize=False)
        assert full.decode(ids["packed_input_ids"]) == text
        assert ("<system>" in text) == (tools is not None)
    assert writes_tools(full)
    full.chat_template = {"tool_use": TOOLS}
    with pytest.raises(ModelError, match="none is the default one"):
        build(DIALOGUE, tokenizer=full)


def test_tools_and_tool_calls_are_passed_to_the_template(build):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    dialogue = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two", "tool_calls": None},
    ]
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        dataset = build({"messages": dialogue, "tools": tools}, template=TOOLS)
        assert segments(dataset)[0] == (
            False,
            '<bos><system>[{"name": "add"}]<user>1+1?<assistant>',
        )
        assert trained(dataset) == ['{"name": "add", "arguments": {"a": 1}}<eos>', "two<eos>"]
    assert (
        "<system>"
        not in segments(build({"messages": dialogue, "tools": None}, template=TOOLS))[0][1]
    )
    with pytest.raises(DataError, match="field 'tools' is not a list of tools"):
        build({"messages": dialogue, "tools": ["add"]}, template=TOOLS)
    with pytest.raises(DataError, match="a tool call of message 2 is not JSON: 'a=1'"):
        build(
            [
                dialogue[0],
                {**dialogue[1], "tool_calls": [{"function": {"name": "f", "arguments": "a=1"}}]},
            ]
        )


def test_sharegpt_messages_and_content_parts_are_read(build):
    dialogue = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yo"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "an"}, {"type": "text", "text": "d?"}],
        },
        {"from": "gpt", "value": "ünd"},
    ]
    dataset = build({"conversations": dialogue}, messages_key="conversations")
    assert segments(dataset) == segments(build(DIALOGUE))


CALLED = {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    "message",
    [
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "function_call", "value": '[{"name": "add", "arguments": {"a": 1}}]'},
        {"role": "assistant", "content": None, "function_call": CALLED},
        {"role": "assistant", "tool_calls": [{"id": "call_1", **CALLED}]},
        {"role": "assistant", "tool_calls": json.dumps([{"function": CALLED}])},
    ],
)
def test_tool_calls_are_read_in_all_usual_forms(build, message):
    """Those of ShareGPT were trained on as texts, and arguments without `function` around them as
    a text within JSON."""
    dataset = build([DIALOGUE[0], message, DIALOGUE[2], DIALOGUE[3]], template=TOOLS)
    assert trained(dataset) == ['{"name": "add", "arguments": {"a": 1}}<eos>', "ünd<eos>"]


def test_a_call_next_to_a_text_is_not_lost(build):
    message = {"role": "assistant", "content": "So:", "function_call": CALLED}
    dataset = build([DIALOGUE[0], message], template=TOOLS)
    assert trained(dataset) == ['So:{"name": "add", "arguments": {"a": 1}}<eos>']
    with pytest.raises(DataError, match="a tool call of message 2 is not JSON: 'add"):
        build([DIALOGUE[0], {"from": "function_call", "value": "add(1)"}], template=TOOLS)


@pytest.mark.parametrize("arguments", [{"a": "ä"}, '{"a": "ä"}'])
def test_a_template_may_expect_the_arguments_of_tool_calls_as_text(build, arguments):
    """As DeepSeek's; whether the row holds them as text makes no difference."""
    template = TOOLS.replace("c.function | tojson", "c.function.name + c.function.arguments")
    calls = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    dataset = build([DIALOGUE[0], calls, DIALOGUE[2], DIALOGUE[3]], template=template)
    assert trained(dataset) == ['f{"a": "ä"}<eos>', "ünd<eos>"]


def test_a_turn_that_is_not_to_be_trained_on_is_refused(build):
    """In OpenAI's format, weight 0 says so; it was trained on."""
    weighted = [message | {"weight": 1} for message in DIALOGUE]
    assert trained(build(weighted)) == trained(build(DIALOGUE))
    weighted[1]["weight"] = 0
    with pytest.raises(DataError, match=r"jsonl:1: message 2 has weight 0"):
        build(weighted)
    assert trained(build(weighted, train_on="last")) == ["ünd<eos>"]


def test_a_tool_may_return_nothing(build):
    call = {"function": {"name": "remove", "arguments": {}}}
    calls = {"role": "assistant", "tool_calls": [call]}
    dataset = build(
        [DIALOGUE[0], calls, {"role": "tool", "content": ""}, DIALOGUE[3]], template=TOOLS
    )
    assert trained(dataset) == ['{"name": "remove", "arguments": {}}<eos>', "ünd<eos>"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hi", "message 1 is text"),
        ({"content": "hi"}, "message 1 has no role"),
        ({"role": "user", "content": " "}, "message 1, of the user, is empty"),
        ({"role": "user", "content": [{"type": "image"}]}, "the content of message 1 is not text"),
        ({"role": "user", "content": 7}, "the content of message 1 is not text"),
    ],
)
def test_malformed_messages_are_reported_with_their_line(build, message, says):
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {says}"):
        build(DIALOGUE, [message, DIALOGUE[1]])


@pytest.mark.parametrize(("name", "medium"), [("image", "image"), ("videos", "video")])
def test_a_text_about_an_image_in_another_field_is_refused(build, name, medium):
    messages = [{"role": "user", "content": f"<{medium}>What is it?"}, DIALOGUE[1]]
    with pytest.raises(DataError, match=rf"jsonl:1: the text says <{medium}>, and field '{name}'"):
        build({"messages": messages, name: ["a.png"]})
    for harmless in ({name: []}, {"source": "a.png"}):
        assert trained(build({"messages": messages, **harmless})) == ["yo<eos>"]
    assert trained(build({"messages": DIALOGUE[:2], name: ["cover.png"]})) == ["yo<eos>"]


def test_a_conversation_refused_by_the_template_is_a_bad_row(build):
    strict = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}"
        + PLAIN
    )
    odd = [{"role": "system", "content": "x"}, *DIALOGUE]
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: .*refuses the conversation: .*the user must begin"
    ):
        build(DIALOGUE, odd, template=strict)
    dataset = build(DIALOGUE, odd, template=strict, bad_rows="skip")
    assert (len(dataset), len(dataset.survey().bad_rows)) == (1, 1)


def test_long_conversations_are_cut_if_trained_tokens_remain(build):
    length = len(build(DIALOGUE).preview(0).sequences[0])
    left = build(DIALOGUE, max_length=length - 4, overlong="truncate_left")
    assert trained(left) == ["yo<eos>", "ünd<eos>"]
    assert trained(build(DIALOGUE, max_length=length - 2, overlong="truncate_right")) == [
        "yo<eos>",
        "ün",
    ]
    with pytest.raises(DataError, match="no token that is trained on would be left") as caught:
        build(DIALOGUE, max_length=4, overlong="truncate_right")
    assert caught.value.code == "F30"
    with pytest.raises(DataError, match="nothing but the last answer would be left"):
        build(DIALOGUE, max_length=4, overlong="truncate_left")
