"""Episodes of models with a chat template, whose turns are written by a script."""

import json
from contextlib import nullcontext, suppress
from itertools import accumulate, chain
from typing import get_args, get_type_hints

import pytest
import torch
from chat_templates import (
    byte_level,
    closing,
    end_of_turn,
    public_templates,
    sampled,
    text_templates,
    written_turn,
)

from rlcli.api.chat_template import (
    DAY,
    conversation_text,
    conversation_tokens,
    opens_reasoning,
)
from rlcli.api.data import SequenceSample
from rlcli.api.environment import schemas_of
from rlcli.api.key_meaning import MESSAGES
from rlcli.api.model import FinishedResponse, MicroBatchSpec
from rlcli.api.tool_formats import AUTO, FORMATS, Parsed, ToolCall, tool_format
from rlcli.errors import ModelError, ProjectError, UsageError
from rlcli.interfaces._plain_turns import PlainTurns
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
    """Says its texts, one for each turn, and ends them as its template does; remembers what each
    turn continues."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, iter(texts)
        self.end = end_of_turn(tokenizer)
        self.read, self.turns = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, prompt, seed):
        self.read.append(prompt.tolist())
        return len(self.read) - 1

    def collect(self, until=lambda: False):
        tokens = torch.tensor([*sampled(self.tokenizer, next(self.texts)), *self.end])
        self.turns.append(tokens.tolist())
        scores = -torch.arange(1.0, len(tokens) + 1)
        return [FinishedResponse(len(self.read) - 1, tokens, scores, True, ())]

    def spans(self, response):
        return None


class Scripted:
    """The engine of a model that follows a script."""

    def __init__(self, stream):
        self.stream = stream

    unused = nullcontext

    def open(self, tokenizer, settings, longest_prompt):
        return self.stream


def played(texts, template=HERMES, environment="calculator", messages=QUESTION, **settings):
    """What episodes give in which the policy says this; and the script."""
    tokenizer = byte_level(template or HERMES)
    tokenizer.chat_template = template
    model = tiny_model(tokenizer)
    script = Script(tokenizer, texts)
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


CALL_IN_XML = (
    "<tool_call>\n<function=calculate>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.mark.parametrize(
    ("texts", "counts"),
    [
        ([f"Perhaps {CALL_IN_XML}"], {"turns": 1}),
        ([f"So\n</think>\n\n{CALL_IN_XML}", "It is 2."], {"turns": 2, "tool_calls": 1}),
        ([f"So\n</think>\n\n{CALL_IN_XML}", CALL_IN_XML], {"turns": 2, "tool_calls": 1}),
    ],
)
def test_a_call_in_reasoning_that_the_template_has_opened_is_not_made(texts, counts):
    output, script = played(texts, public_templates()["qwen3_5_think"])
    assert all(script.tokenizer.decode(ids).endswith("<think>\n") for ids in script.read)
    assert numbers(output) == counts


def test_a_text_without_a_template_may_open_reasoning_too():
    tokenizer = byte_level(HERMES)
    turns = PlainTurns(tokenizer, sampled(tokenizer, "How much is 12+7?\n<think>\n"))
    assert turns.in_reasoning
    turns.append_sampled(sampled(tokenizer, "So</think>"))
    assert not turns.in_reasoning


def test_turns_of_a_text_that_nothing_is_observed_between_are_apart():
    """`turn_discount` and `credit: to_go` count turns by what is between them."""
    tokenizer = byte_level(HERMES)
    turns = PlainTurns(tokenizer, sampled(tokenizer, "go"))
    for _ in range(2):
        turns.append_sampled(sampled(tokenizer, "left"))
        turns.append_messages([{"role": "user", "content": ""}])
    (_, end), (start, _) = turns.rows[0].turns
    assert tokenizer.decode(turns.ids[end:start]) == "\n"


def test_a_template_that_says_nothing_of_tools_is_warned_about(caplog):
    played(["It is 19."], FORGETFUL)
    assert caplog.text.count("does not say which tools there are") == 1
    assert "the environment calculator in the prompt" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"template": HERMES}, {"template": FORGETFUL, "tool_format": "json"},
     {"template": FORGETFUL, "environment": "guess"}],
    ids=str,
)  # fmt: skip
def test_nothing_is_warned_about_where_tools_are_written_or_not_meant_to_be(settings, caplog):
    played(["It is 19."] * 8, **settings)
    assert "tools" not in caplog.text


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


THINKING = [f"<think>hm</think>{called('1')}", f"<think>so</think>{called('2')}", "3"]


def seen_and_said(script):
    """For each turn, the tokens that the policy continued and those that it sampled."""
    return [read + turn for read, turn in zip(script.read, script.turns, strict=True)]


def test_where_a_template_rewrites_earlier_turns_another_row_begins():
    output, script = played(THINKING, FORGETFUL, tool_format="hermes")
    first, second, third = seen_and_said(script)
    assert output.data["packed_input_ids"].tolist() == first + second + third
    begins = output.data["forks"].nonzero().flatten().tolist()
    assert begins == [len(first), len(first + second)]
    assert numbers(output) == {"turns": 3, "tool_calls": 2, "forks": 2}
    assert "hm" not in script.tokenizer.decode(script.read[1])
    assert output.seqlens["seq_no_eos_mask"] == [[1]], "it is one response"


def test_each_sampled_token_is_trained_on_in_one_row_with_its_logprob():
    output, script = played(THINKING, FORGETFUL, tool_format="hermes")
    assert trained_tokens(output) == [*chain(*script.turns)]
    trained = ~output.data["prompt_mask"]
    scores = [-float(number) for turn in script.turns for number in range(1, len(turn) + 1)]
    assert output.data["packed_logprobs"][trained[1:]].tolist() == scores


def test_a_row_that_there_is_no_room_for_is_left_out():
    _, script = played(THINKING, FORGETFUL, tool_format="hermes")
    room = {"generation": {"max_new_tokens": len(script.turns[0]) + len(script.read[1]) + 30}}
    output, _ = played(THINKING, FORGETFUL, tool_format="hermes", turn_tokens=31, **room)
    assert output.data["packed_input_ids"].tolist() == seen_and_said(script)[0]
    assert numbers(output) == {"turns": 1, "tool_calls": 1, "out_of_tokens": 1}
    assert not output.data["forks"].any()


def test_rewards_of_turns_are_at_their_ends_in_all_rows():
    texts = ["<think>a</think>zero", "<think>b</think>one", "<think>c</think>two", "1"]
    game = {"environment": "guess", "environment_args": {"highest": 1}}
    output, script = played(texts, FORGETFUL, scored=True, turn_rewards=True, max_turns=4, **game)
    assert numbers(output) == {"turns": 4, "forks": 3}
    rewards = output.data["dense_rewards"]
    ends = [end - 1 for end in accumulate(map(len, seen_and_said(script)))]
    assert rewards[ends].tolist() == pytest.approx([-0.1, -0.1, -0.1, 1.0])
    assert rewards.count_nonzero() == 4
    assert output.data["rewards"].tolist() == pytest.approx([0.7])


def test_a_template_that_rewrites_earlier_turns_is_refused_if_the_key_says_so():
    refused = {"tool_format": "hermes", "on_rewrite": "refuse"}
    with pytest.raises(ModelError, match="rewrites earlier turns"):
        played(THINKING, FORGETFUL, **refused)
    output, _ = played(THINKING, FORGETFUL, max_turns=1, **refused)
    assert numbers(output) == {"turns": 1, "tool_calls": 1, "out_of_turns": 1}
    assert "forks" not in output.keys


FORKS = {
    "deepseek_r1_distill": (3, 1),
    "deepseek_r1_distill_training": (3, 1),
    "deepseekv3": (3, 1),
    "deepseekv3_training": (3, 1),
    "diffusion_gemma": (0, 1),
    "diffusion_gemma_training": (0, 1),
    "gemma4": (0, 1),
    "glm4moe": (3, 0),
    "glm4moe_training": (3, 0),
    "gptoss": (3, 2),
    "gptoss_training": (3, 2),
    "lfm2_2_5": (2, 0),
    "lfm2_2_5_vl": (2, 0),
    "muse_glimmer": (3, 2),
    "muse_glimmer_training": (3, 2),
    "nemotron_3_5_lightning": (3, 0),
    "nemotron_3_5_lightning_training": (3, 0),
    "nemotron_3_nano": (3, 0),
    "nemotron_3_nano_training": (3, 0),
    "nemotron_3_super": (3, 0),
    "nemotron_3_super_training": (3, 0),
    "nemotron_3_ultra": (3, 0),
    "nemotron_3_ultra_training": (3, 0),
    "qwen3": (2, 2),
    "qwen3_5_nothink": (3, 0),
    "qwen3_5_nothink_training": (2, 0),
    "qwen3_5_think": (3, 0),
    "qwen3_5_think_training": (3, 0),
    "qwen3_6": (3, 0),
    "qwen3_6_training": (3, 0),
    "qwen3_8": (3, 0),
    "qwen3_8_training": (3, 0),
    "qwen3_training": (1, 0),
}
"""Template → how often it rewrites what was before, in a game of four turns whose first two have
thoughts, and in three turns with two calls."""


def a_call(template):
    """A call as a template writes it, and the name of that format; JSON, if it writes none that is
    known."""
    tokenizer = byte_level(template)
    arguments = {"expression": "12+7"}
    turn = Parsed("", (ToolCall("calculate", arguments),)).message
    with suppress(ModelError):
        if tool_format(tokenizer, AUTO, TOOLS).name != "json":
            text = written_turn(tokenizer, QUESTION, turn, TOOLS)
            return text.removesuffix(closing(tokenizer)), AUTO
    prompt = conversation_text(tokenizer, QUESTION, add_generation_prompt=True, day=DAY)
    before = "</think>" if opens_reasoning(prompt) else ""
    return before + json.dumps({"name": "calculate", "arguments": arguments}), "json"


def trained_tokens(output):
    """Those that were sampled, row after row."""
    return output.data["packed_input_ids"][~output.data["prompt_mask"]].tolist()


CHOSEN = ("deepseekv3", "glm4moe", "gptoss", "llama3_2", "qwen2_5", "qwen3", "qwen3_5_think")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in CHOSEN else pytest.mark.exhaustive)
        for name in text_templates()
    ],
)
def test_with_public_templates_all_turns_are_trained_on_as_they_were_sampled(name):
    template, room = text_templates()[name], {"generation": {"max_new_tokens": 20_000}}
    thoughts = [f"<think>\n{thought}\n</think>\n\n{thought}" for thought in ("a", "b")]
    game = {"environment": "guess", "environment_args": {"highest": 1}}
    of_game = played([*thoughts, "two", "1"], template, **game, **room)
    call, written_as = a_call(template)
    of_tools = played([call, call, "19"], template, tool_format=written_as, **room)
    forks = [forks_as_recorded(*of_game, turns=4), forks_as_recorded(*of_tools, turns=3)]
    assert tuple(forks) == FORKS.get(name, (0, 0))


def forks_as_recorded(output, script, turns):
    """The number of forks of an episode, whose rows and turns are those of the script."""
    counted = numbers(output)
    assert counted["turns"] == turns
    assert trained_tokens(output) == [*chain(*script.turns)]
    begins = output.data["forks"].nonzero().flatten()
    rows = [row.tolist() for row in output.data["packed_input_ids"].tensor_split(begins)]
    assert rows == rows_of_script(script)
    assert counted.get("forks", 0) == len(rows) - 1
    return len(rows) - 1


def rows_of_script(script):
    """What a policy has seen and said, wherever that is not how the text it saw next begins."""
    following = [*script.read[1:], []]
    pairs = zip(seen_and_said(script), following, strict=True)
    return [row for row, text in pairs if text[: len(row)] != row]


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
def written(tmp_path, monkeypatch):
    """The function that makes an environment of its methods."""
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    folder = tmp_path / "interfaces" / "environments"
    folder.mkdir(parents=True)

    def make(name, **methods):
        lines = [f"    def {head}:\n        return {value}\n" for head, value in methods.items()]
        (folder / f"{name}.py").write_text(
            "from rlcli.api.environment import Environment, Observation, register_environment\n\n\n"
            "class Test(Environment):\n" + "\n".join(lines) + "\n\n"
            f"register_environment({name!r}, Test)\n"
        )
        return name

    return make


@pytest.fixture
def begins_with(written):
    """The function that makes an environment of what its `reset` returns."""

    def make(name, beginning):
        methods = {"reset(self, row, seed)": beginning, "score(self, answer)": "1.0"}
        return written(name, **methods)

    return make


def test_turns_of_a_game_with_tools_call_these_or_are_steps(written):
    methods = {
        "tool_schemas(self)": TOOLS,
        "call_tool(self, name, arguments)": "'19'",
        "step(self, action)": "Observation(f'{action}?', reward=1.0, done=action == 'bye')",
    }
    output, script = played(
        [called("12+7"), "well", called(12), "bye"],
        environment=written("zz_shop", **methods),
        scored=True,
        max_turns=9,
    )
    read = [script.tokenizer.decode(ids).split("<|im_end|>\n<|im_start|>") for ids in script.read]
    assert "# Tools" in read[0][0]
    assert read[1][-2].endswith("<tool_response>\n19\n</tool_response>")
    assert read[2][-2] == "user\nwell?"
    assert "expression is 12" in read[3][-2]
    assert numbers(output) == {"turns": 4, "tool_calls": 2, "tool_mistakes": 1}
    assert output.data["rewards"].tolist() == [2.0]


def test_a_reset_may_return_messages(begins_with):
    messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "go"}]
    environment = begins_with(
        "zz_messages", f"{messages!r} + [{{'role': 'user', 'content': row['prompt']}}]"
    )
    _, script = played(["so"], environment=environment)
    assert script.read[0] == conversation_tokens(
        script.tokenizer, [*messages, *QUESTION], add_generation_prompt=True, day=DAY
    )


def test_a_reset_that_returns_a_text_leaves_the_system_prompt(begins_with):
    """It was lost: a dataset's `system` had no effect with games that begin with a text."""
    system = {"role": "system", "content": "Rhyme."}
    environment = begins_with("zz_text", "'Guess: ' + row['prompt']")
    _, script = played(["so"], environment=environment, messages=[system, *QUESTION])
    user = {"role": "user", "content": f"Guess: {QUESTION[0]['content']}"}
    assert script.read[0] == conversation_tokens(
        script.tokenizer, [system, user], add_generation_prompt=True, day=DAY
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
