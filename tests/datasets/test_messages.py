"""Conversations as other tools and tables write them."""

import pytest

from rlcli.datasets._jsonl import BadRow
from rlcli.datasets._messages import prompt_field, read_conversation

QUESTION = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "two"}


def conversation(**fields):
    return read_conversation(fields, "messages", "tools", None)


@pytest.mark.parametrize(
    "nothing", [{"tool_calls": []}, {"function_call": {}}, {"tool_calls": [], "function_call": ""}]
)
def test_messages_with_an_empty_list_of_tool_calls_are_those_without(nothing):
    """Templates such as Llama 3.1's test whether the field exists, and take an empty list for
    calls."""
    messages = [QUESTION | nothing, ANSWER | nothing]
    assert conversation(messages=messages).messages == [QUESTION, ANSWER]


@pytest.mark.parametrize("tools", ["", " ", "[]", [], None])
def test_a_row_may_have_no_tools_in_its_column(tools):
    assert conversation(messages=[QUESTION, ANSWER], tools=tools).tools is None


@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_empty_system_prompt_is_one_of_its_own(role):
    """Templates such as Qwen2.5's write a system prompt where a conversation has none."""
    messages = [{"role": role, "content": ""}, QUESTION, ANSWER]
    assert conversation(messages=messages).messages == messages


def test_a_prompt_is_more_than_an_empty_system_prompt():
    system = {"role": "system", "content": ""}
    assert prompt_field({"prompt": [system, QUESTION]}, "prompt") == [system, QUESTION]
    with pytest.raises(BadRow, match="field 'prompt' has no text"):
        prompt_field({"prompt": system}, "prompt")
