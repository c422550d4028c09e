"""Tool calls are read as templates write them, and whatever else a model writes is survived."""

import json

import pytest
from chat_templates import (
    MISTRAL,
    byte_level,
    closing,
    end_of_turn,
    public_templates,
    sampled,
    written_turn,
)
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.chat_template import opens_reasoning
from rlcli.api.tool_call_reader import MOST_CALLS
from rlcli.api.tool_formats import (
    FORMATS,
    LONGEST,
    MOST_PROBLEMS,
    Parsed,
    ToolCall,
    ToolFormat,
    call_id,
    tool_format,
)
from rlcli.api.tool_schema import tool_schema
from rlcli.api.turns import Conversation
from rlcli.errors import ModelError, UsageError
from rlcli.testing.tokenizer import byte_tokenizer

QUESTION = [{"role": "user", "content": "Find it."}]


def find(words: list[str], limit: int, where: str, share: float, exact: bool, options: dict):
    """Find something."""


TOOLS = [tool_schema(find)]
ARGUMENTS = {
    "words": ["a b", "ü 漢 😀", '"quoted"\n'],
    "limit": -3,
    "where": "3 < 4\n  and {x} <b>",
    "share": 0.25,
    "exact": True,
    "options": {"nested": {"list": [1, None, False]}, "": "x"},
}
CALL = ToolCall("find", ARGUMENTS)
OTHER = ToolCall("find", {"limit": 1})

OF_TEMPLATE = {
    "glm4moe": "glm",
    "glm4moe_training": "glm",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "nemotron_3_5_lightning": "xml",
    "nemotron_3_5_lightning_training": "xml",
    "nemotron_3_nano": "xml",
    "nemotron_3_nano_training": "xml",
    "nemotron_3_super": "xml",
    "nemotron_3_super_training": "xml",
    "nemotron_3_ultra": "xml",
    "nemotron_3_ultra_training": "xml",
    "qwen2_5": "hermes",
    "qwen2_5_training": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_instruct_2507_training": "hermes",
    "qwen3_training": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_vl_training": "hermes",
    "qwen3_5_nothink": "xml",
    "qwen3_5_nothink_training": "xml",
    "qwen3_5_think": "xml",
    "qwen3_5_think_training": "xml",
    "qwen3_6": "xml",
    "qwen3_6_training": "xml",
    "qwen3_8": "xml",
    "qwen3_8_training": "xml",
}
DROPS_EMPTY_THOUGHTS = {"qwen3_5_nothink", "qwen3_5_nothink_training"}
UNSUPPORTED = ("deepseekv3", "gemma4", "diffusion_gemma", "gptoss", "lfm2_2_5", "muse_glimmer")


@pytest.mark.parametrize("name", public_templates())
def test_the_format_of_a_template_is_found_by_trial(name):
    tokenizer = byte_level(public_templates()[name])
    if name.startswith(UNSUPPORTED):
        with pytest.raises(ModelError, match="set tool_format: json"):
            tool_format(tokenizer)
    else:
        assert tool_format(tokenizer).name == OF_TEMPLATE.get(name, "json")


def written_calls(tokenizer, calls, text=""):
    """The text of a turn with calls, as the template writes it."""
    turn = written_turn(tokenizer, QUESTION, Parsed(text, calls).message, TOOLS)
    return turn.removesuffix(closing(tokenizer))


@pytest.mark.parametrize("name", OF_TEMPLATE)
def test_what_a_template_writes_is_read_again(name):
    tokenizer = byte_level(public_templates()[name])
    form = tool_format(tokenizer, tools=TOOLS)
    assert form.parse(written_calls(tokenizer, (CALL,))).calls == (CALL,)
    if form.name == "llama3":
        return
    parsed = form.parse(written_calls(tokenizer, (CALL, OTHER), "I look."))
    assert parsed.calls == (CALL, OTHER)
    assert "I look." in parsed.text
    assert parsed.problems == ()


@pytest.mark.parametrize("name", sorted(OF_TEMPLATE.keys() - DROPS_EMPTY_THOUGHTS))
def test_a_call_that_was_read_is_followed_by_its_result(name):
    tokenizer = byte_level(public_templates()[name])
    conversation = Conversation(tokenizer, QUESTION, TOOLS)
    ids = sampled(tokenizer, written_calls(tokenizer, (CALL,), "<think>\nI look.\n</think>\n\n"))
    text = conversation.append_sampled([*ids, *end_of_turn(tokenizer)])
    turn = tool_format(tokenizer, tools=TOOLS).parse(text).message
    result = {"role": "tool", "name": "find", "content": "46", "tool_call_id": call_id(0)}
    extension = conversation.append_messages([result], turn)
    assert not extension.forked
    assert "46" in tokenizer.decode(extension.ids)
    assert "find" not in tokenizer.decode(extension.ids)


def test_mistrals_format_is_found_and_read():
    tokenizer = byte_level(MISTRAL)
    form = tool_format(tokenizer, tools=TOOLS)
    assert form.name == "mistral"
    assert form.parse(written_calls(tokenizer, (CALL, OTHER))).calls == (CALL, OTHER)


def test_a_format_without_names_is_not_taken_for_a_template_without_calls():
    """Kimi's template writes the ids of calls, which have the names of the tools in them."""
    tokenizer = byte_level(
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson "
        "}}<|tool_call_end|>{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
    )
    with pytest.raises(ModelError, match="in a format that is not supported"):
        tool_format(tokenizer)


def test_a_format_can_be_named():
    tokenizer = byte_level(public_templates()["gptoss"])
    assert tool_format(tokenizer, "json").name == "json"
    assert tool_format(byte_tokenizer()).name == "json"
    with pytest.raises(UsageError, match="tool format 'yaml' is unknown"):
        tool_format(tokenizer, "yaml")


def test_a_message_has_its_calls_with_ids():
    message = Parsed("I look.", (CALL, OTHER)).message
    assert message["content"] == "I look."
    assert [call["id"] for call in message["tool_calls"]] == [call_id(0), call_id(1)]
    assert len(call_id(MOST_CALLS)) == 9
    assert message["tool_calls"][0]["function"] == {"name": "find", "arguments": ARGUMENTS}
    assert Parsed("done").message == {"role": "assistant", "content": "done"}


ADD = ToolCall("add", {"a": 1})
READ = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', (ADD,)),
    ("hermes", '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>' * 2, (ADD, ADD)),
    ("hermes", '<tool_call> {"name": "a", "arguments": {"b": "</tool_call>"}} </tool_call>',
     (ToolCall("a", {"b": "</tool_call>"}),)),
    ("hermes", '<think><tool_call>{}</tool_call></think>no', ()),
    ("hermes", "<think><tool_call>{}</tool_call>", ()),
    ("xml", "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>", (ADD,)),
    ("xml", "<tool_call><function=now></function></tool_call>", (ToolCall("now", {}),)),
    ("xml", "<tool_call><function=f><parameter=a>\n\n x\n</parameter></function></tool_call>",
     (ToolCall("f", {"a": "\n x"}),)),
    ("xml", "<tool_call><function=f><parameter=a>True</parameter></function></tool_call>",
     (ToolCall("f", {"a": True}),)),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", (ADD,)),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', (ADD,)),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', (ADD,)),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}',
     (ADD, ADD)),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', (ADD,)),
    ("llama3", '{"type": "function", "name": "add", "parameters": {"a": 1}}', (ADD,)),
    ("llama3", '{"name": "add", "arguments": {"a": 1}}', (ADD,)),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
     (ADD, ADD)),
    ("json", 'First {x} {"name": "add", "arguments": {"a": 1}} and', (ADD,)),
    ("json", '{"name": "add", "parameters": {"a": 1}}', (ADD,)),
    ("json", '{"name": "Ann", "age": 5}', ()),
    ("json", r"\frac{1}{2} " * 200, ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), READ)
def test_calls_are_read(name, text, calls):
    parsed = ToolFormat(name).parse(text)
    assert parsed.calls == calls
    assert parsed.problems == ()
    if not calls:
        assert parsed.text == text


NULL_OR_TEXT = [{"type": "null"}, {"type": "string"}]
TYPED = [
    ({"anyOf": NULL_OR_TEXT}, "12345", "12345"),
    ({"anyOf": NULL_OR_TEXT}, "True", "True"),
    ({"anyOf": NULL_OR_TEXT}, "None", None),
    ({"type": ["string", "null"]}, "12345", "12345"),
    ({"type": ["boolean", "string"]}, "12345", "12345"),
    ({"type": ["boolean", "string"]}, "True", True),
    ({"type": ["integer", "string"]}, "12345", 12345),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "[1]", "[1]"),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, '["1"]',
     ["1"]),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"type": "string", "nullable": True}, "12345", "12345"),
    ({"type": "boolean"}, "12345", 12345),
    ({}, "12345", 12345),
    (True, "12345", 12345),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_a_text_that_looks_like_json_is_of_a_type_that_its_schema_allows(schema, text, value):
    parameters = {"type": "object", "properties": {"zip": schema}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    xml = f"<function=look><parameter=zip>{text}</parameter></function>"
    glm = f"look<arg_key>zip</arg_key><arg_value>{text}</arg_value>"
    for name, written in (("xml", xml), ("glm", glm)):
        (call,) = ToolFormat(name, [tool]).parse(f"<tool_call>{written}</tool_call>").calls
        assert call.arguments == {"zip": value}
        assert type(call.arguments["zip"]) is type(value)


def test_calls_in_reasoning_that_the_prompt_has_opened_do_not_count():
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    form = ToolFormat("hermes")
    unfinished = form.parse(f"Perhaps {good}", in_reasoning=True)
    assert unfinished == Parsed(f"Perhaps {good}")
    assert form.parse(f"{good}<tool_call>{{", in_reasoning=True).problems == ()
    assert form.parse(f"Perhaps {good}</think>{good}", in_reasoning=True).calls == (ADD,)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What does <think> mean?\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_may_open_the_reasoning_of_the_turn_after_it(prompt, opens):
    assert opens_reasoning(prompt) is opens


PROBLEMS = [
    ("hermes", "<tool_call>", "it is not valid JSON"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "it is not valid JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "it is not valid JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}} and', "</tool_call> is missing"),
    ("hermes", "<tool_call>[]</tool_call>", "it must be an object with name and arguments"),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "its arguments must be an object"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', "its name must be that of a tool"),
    ("hermes", '<tool_call>{"name": "a\\nb", "arguments": {}}', "its name must be that of a tool"),
    ("hermes", '<tool_call>{"name": "a", "name": "b", "arguments": {}}', "the key 'name' appears"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"a": NaN}}', "NaN is not a finite number"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"a": 1e999}}', "1e999 is not a finite"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"a": ["\\ud800"]}}', "it has half"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}",
     "that is nested more than 64 levels deep"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"a": ' + "[" * 10_000 + "]" * 10_000 + "}}",
     "it is not valid JSON"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"a": ' + "9" * 5000 + "}}", ""),
    ("xml", "<tool_call><function=add", "> is missing"),
    ("xml", "<tool_call>add</tool_call>", "<function= is missing"),
    ("xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "</parameter> is"),
    ("xml", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", "</function> is"),
    ("xml", "<tool_call><function=f><parameter=a>1</parameter><parameter=a>1</parameter>"
     "</function></tool_call>", "the key 'a' appears twice"),
    ("glm", "<tool_call>add", "</tool_call> is missing"),
    ("glm", "<tool_call>add<arg_key>a</tool_call>", "an argument is <arg_key>"),
    ("mistral", "[TOOL_CALLS]", "[ARGS] is missing"),
    ("mistral", "[TOOL_CALLS] [1]", "it must be an object"),
    ("llama3", "<|python_tag|>print(1)", "an object is missing"),
    ("llama3", '{"name": "add", "parameters": [1]}', "its parameters must be an object"),
    ("json", '{"name": "add", "arguments": {', "it is not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "problem"), PROBLEMS)
def test_faults_are_described(name, text, problem):
    parsed = ToolFormat(name).parse(text)
    assert parsed.calls == ()
    assert parsed.text == text
    (line,) = parsed.problems
    assert line.startswith(f"a tool call cannot be read: {problem}")
    assert "\n" not in line


def test_an_end_of_reasoning_within_arguments_ends_nothing():
    call = '<tool_call>{"name": "add", "arguments": {"a": "x</think>y"}}</tool_call>'
    form = ToolFormat("hermes")
    expected = (ToolCall("add", {"a": "x</think>y"}),)
    assert form.parse(f"<think>a</think>b {call} c") == Parsed("<think>a</think>b  c", expected)
    assert form.parse(call).calls == form.parse(f"a</think>{call}", in_reasoning=True).calls
    assert form.parse(call).calls == expected
    for later in ("<think>", ""):
        text = f"<think>a</think>{call}{later}perhaps {call}</think>{call}"
        assert form.parse(text).calls == expected


def test_a_call_with_a_fault_does_not_hide_the_others():
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    parsed = ToolFormat("hermes").parse(f"a {good} b <tool_call>{{bad}}</tool_call> c {good} d")
    assert parsed.calls == (ADD, ADD)
    assert len(parsed.problems) == 1
    assert parsed.text == "a  b <tool_call>{bad}</tool_call> c  d"


def test_calls_and_texts_have_limits():
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    parsed = ToolFormat("hermes").parse(good * (MOST_CALLS + 1))
    assert len(parsed.calls) == MOST_CALLS
    assert parsed.problems == (f"only {MOST_CALLS} tool calls of a turn are read",)
    late = ToolFormat("hermes").parse(" " * LONGEST + good)
    assert late.calls == ()
    assert late.problems == (f"only the first {LONGEST:,} characters are read for tool calls",)
    many = ", ".join([json.dumps({"name": "add", "arguments": {"a": 1}})] * (MOST_CALLS + 1))
    listed = ToolFormat("mistral").parse(f"[TOOL_CALLS] [{many}]")
    assert len(listed.calls) == MOST_CALLS
    assert listed.problems == parsed.problems


PIECES = (
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[", "]",
    "{", "}", '{"name": "f", "arguments": {', '{"name": "f", "parameters": {}}', '"a": ', '"', ":",
    "NaN", "-Infinity", "1e999", "\\ud800", "\ud800", "\x00", "\n", "<think>", "</think>", ";",
    "<|python_tag|>", "😀", "9" * 4301, ",", "f", "\ufdd0",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
def test_whatever_a_model_writes_is_survived(name, pieces):
    assert_survived(name, "".join(pieces))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", [*PIECES, "<tool_call>{", '<tool_call>{"name":', '{"name":'])
def test_a_text_of_many_equal_pieces_is_survived(name, piece):
    assert_survived(name, piece * (200_000 // len(piece)))


def test_a_text_of_a_hundred_megabytes_is_survived():
    assert_survived("hermes", "<tool_call>{" + "x" * 100_000_000)


def assert_survived(name, text):
    parsed = ToolFormat(name, TOOLS).parse(text)
    parsed.text.encode()
    json.dumps(parsed.message, ensure_ascii=False, allow_nan=False).encode()
    assert len(parsed.calls) <= MOST_CALLS
    assert len(parsed.problems) <= MOST_PROBLEMS
    for problem in parsed.problems:
        assert problem.isprintable()
        assert len(problem) < 200
