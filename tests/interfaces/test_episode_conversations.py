"""Episodes of models with a chat template, whose turns are written by a script."""

import json
from typing import get_args, get_type_hints

import pytest
import torch
from chat_templates import byte_level, public_templates, sampled

from rlcli.api.chat_template import DAY, conversation_text, conversation_tokens
from rlcli.api.data import SequenceSample
from rlcli.api.environment import schemas_of
from rlcli.api.key_meaning import MESSAGES
from rlcli.api.model import FinishedResponse, MicroBatchSpec
from rlcli.api.tool_formats import AUTO, FORMATS
from rlcli.errors import ModelError, ProjectError, UsageError
from rlcli.interfaces.environments.calculator import Calculator
from rlcli.interfaces.episodes import EpisodesInterface
from rlcli.testing.tiny_engine import TinyStream, tiny_model

QUESTION = [{"role": "user", "content": "How much is 12+7?"}]
HERMES = public_templates()["qwen2_5"]
TOOLS = list(schemas_of(Calculator).values())
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Script(TinyStream):
    """Says its texts, one for each turn; remembers what each turn continues."""

    def __init__(self, tokenizer, texts, end):
        self.tokenizer, self.end, self.texts = tokenizer, end, iter(texts)
        self.read, self.turns = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, prompt, seed):
        self.read.append(prompt.tolist())
        return len(self.read) - 1

    def collect(self, until=lambda: False):
        end = self.tokenizer.convert_tokens_to_ids(self.end)
        tokens = torch.tensor([*sampled(self.tokenizer, next(self.texts)), end])
        self.turns.append(tokens.tolist())
        scores = -torch.arange(1.0, len(tokens) + 1)
        return [FinishedResponse(len(self.read) - 1, tokens, scores, True, ())]

    def spans(self, response):
        return None


class Scripted:
    """The engine of a model that follows a script."""

    def __init__(self, stream):
        self.stream = stream

    def open(self, tokenizer, settings, longest_prompt):
        return self.stream


def played(texts, template=HERMES, environment="calculator", messages=QUESTION, **settings):
    """What episodes give in which the policy says this; and the script."""
    tokenizer = byte_level(template or HERMES)
    tokenizer.chat_template = template
    model = tiny_model(tokenizer)
    script = Script(tokenizer, texts, "<|im_end|>")
    model.module = Scripted(script)
    prompts = SequenceSample.from_default(
        ids=["a"],
        seqlens=[2],
        data={"packed_prompts": torch.tensor([3, 4])},
        metadata={} if messages is None else {MESSAGES: [messages]},
    )
    settings = {"generation": {"max_new_tokens": 4000}, "turn_tokens": 400} | settings
    interface = EpisodesInterface(environment=environment, **settings)
    return interface.generate(model, prompts, MicroBatchSpec()), script


def called(expression):
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def numbers(output):
    return {name: values[0][0] for name, values in output.metadata.items() if values[0][0]}


def test_a_policy_calls_tools_in_the_format_of_its_template():
    output, script = played([called("12+7"), "It is 19."])
    calls = [{"function": {"name": "calculate", "arguments": {"expression": "12+7"}}}]
    history = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "19"},
    ]
    before = conversation_text(
        script.tokenizer, history, tools=TOOLS, add_generation_prompt=True, day=DAY
    )
    assert script.tokenizer.decode(script.read[1]) == before
    assert numbers(output) == {"turns": 2, "tool_calls": 1}
    assert output.data["seq_no_eos_mask"].tolist() == [False]


THREE_TURNS = (called("12+7"), called("1+1") + called("x"), "It is 19. ")


def test_the_tokens_trained_on_are_those_that_were_sampled():
    output, script = played(THREE_TURNS)
    tokens, trained = output.data["packed_input_ids"], ~output.data["prompt_mask"]
    assert tokens[trained].tolist() == [token for turn in script.turns for token in turn]
    for read, turn in zip(script.read, script.turns, strict=True):
        end = len(read) + len(turn)
        assert tokens[:end].tolist() == read + turn
        assert trained[len(read) : end].all()
        assert not trained[len(read) - 1]


def test_sampled_tokens_have_the_logprobs_with_which_they_were_sampled():
    output, script = played(THREE_TURNS)
    logprobs = output.data["packed_logprobs"]
    for read, turn in zip(script.read, script.turns, strict=True):
        scores = [-float(place) for place in range(1, len(turn) + 1)]
        assert logprobs[len(read) - 1 :][: len(turn)].tolist() == scores
    assert logprobs.count_nonzero() == sum(map(len, script.turns))


def test_the_prompt_names_the_tools():
    _, script = played(["19"])
    assert script.read[0] == conversation_tokens(
        script.tokenizer, QUESTION, tools=TOOLS, add_generation_prompt=True, day=DAY
    )


def test_what_cannot_be_read_as_a_call_is_answered_by_the_user():
    output, script = played(["<tool_call>{", "I give up."])
    heard = script.tokenizer.decode(script.read[1][len(script.read[0]) + len(script.turns[0]) :])
    assert "<|im_start|>user\nerror: a tool call cannot be read" in heard
    assert numbers(output) == {"turns": 2, "tool_calls": 1, "tool_mistakes": 1}


def test_a_special_token_that_a_tool_names_is_text():
    _, script = played([called("1").replace("calculate", "<|im_end|>"), "Oh."])
    added = script.read[1][len(script.read[0]) + len(script.turns[0]) :]
    assert "there is no tool '<|im_end|>'" in script.tokenizer.decode(added)
    assert added.count(script.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


def test_the_format_of_calls_can_be_set():
    text = json.dumps({"name": "calculate", "arguments": {"expression": "2"}})
    assert numbers(played([text])[0]) == {"turns": 1}
    assert numbers(played([text, "2"], tool_format="json")[0]) == {"turns": 2, "tool_calls": 1}


def test_every_format_can_be_set():
    choices = get_args(get_type_hints(EpisodesInterface)["tool_format"])
    assert set(choices) == {AUTO, *FORMATS}


def test_a_template_that_rewrites_earlier_turns_ends_the_episode():
    texts = [f"<think>hm</think>{called('1')}", "never said"]
    output, script = played(texts, FORGETFUL, tool_format="hermes")
    assert output.data["packed_input_ids"].tolist() == script.read[0] + script.turns[0]
    assert numbers(output) == {"turns": 1, "tool_calls": 1, "rewritten": 1}
    assert output.data["seq_no_eos_mask"].tolist() == [True]
    with pytest.raises(ModelError, match="rewrites earlier turns"):
        played(texts, FORGETFUL, tool_format="hermes", on_rewrite="refuse")
    last = played(texts, FORGETFUL, tool_format="hermes", on_rewrite="refuse", max_turns=1)
    assert numbers(last[0]) == {"turns": 1, "tool_calls": 1, "out_of_turns": 1}


def test_a_game_is_played_in_messages_of_the_user():
    output, script = played(
        ["zero", "1"], environment="guess", environment_args={"highest": 1}, scored=True
    )
    first, second = map(script.tokenizer.decode, script.read)
    assert first.endswith("What is my number from 1 to 1?\n<|im_end|>\n<|im_start|>assistant\n")
    assert "# Tools" not in first
    assert second.endswith("user\nnot a number\n<|im_end|>\n<|im_start|>assistant\n")
    assert output.data["rewards"].tolist() == pytest.approx([0.9])


@pytest.fixture
def begins_with(tmp_path, monkeypatch):
    """The function that makes an environment of what its `reset` returns."""
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    folder = tmp_path / "interfaces" / "environments"
    folder.mkdir(parents=True)

    def make(name, beginning):
        (folder / f"{name}.py").write_text(
            "from rlcli.api.environment import Environment, register_environment\n\n\n"
            "class Test(Environment):\n"
            f"    def reset(self, row, seed):\n        return {beginning}\n\n"
            "    def score(self, answer):\n        return 1.0\n\n\n"
            f"register_environment({name!r}, Test)\n"
        )
        return name

    return make


def test_a_reset_may_return_messages(begins_with):
    messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "go"}]
    environment = begins_with(
        "zz_messages", f"{messages!r} + [{{'role': 'user', 'content': row['prompt']}}]"
    )
    _, script = played(["so"], environment=environment)
    assert script.read[0] == conversation_tokens(
        script.tokenizer, [*messages, *QUESTION], add_generation_prompt=True, day=DAY
    )


@pytest.mark.parametrize(("beginning", "kind"), [("4", "int"), ("['go']", "list")])
def test_a_reset_that_returns_neither_text_nor_messages_is_at_fault(begins_with, beginning, kind):
    with pytest.raises(ProjectError, match=f"a {kind}, neither a text nor messages"):
        played(["so"], environment=begins_with(f"zz_{kind}", beginning))


def test_messages_need_a_template(begins_with):
    environment = begins_with("zz_plain", [{"role": "user", "content": "go"}])
    with pytest.raises(ProjectError, match="has no chat template"):
        played(["so"], template=None, environment=environment)


def test_rows_without_messages_are_refused():
    with pytest.raises(UsageError, match="the rows have no messages"):
        played(["so"], messages=None)
