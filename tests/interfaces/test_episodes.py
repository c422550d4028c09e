"""Episodes: which tokens count as sampled, when they end, what they earn; and their contract."""

import contextlib
import itertools
import json
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from heard_work import heard_work
from reading_tokenizer import ReadingTokenizer

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.environment import Observation
from rlcli.api.headway import Count
from rlcli.api.model import MicroBatchSpec
from rlcli.api.tool_call_reader import MOST_CALLS
from rlcli.errors import ProjectError, UsageError
from rlcli.interfaces._environment_calls import AnsweringEnvironment
from rlcli.interfaces.episodes import EpisodesInterface
from rlcli.interfaces.generation import GenerationInterface
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import tiny_model
from rlcli.testing.tiny_models import TinyTokenizer

KEYS = ("packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask")
SPEC = MicroBatchSpec()
NUMBERS = itertools.count()
"""Of environments that tests make: a process loads each name once."""


class TestContract(InterfaceContract):
    name = "episodes"
    args = {"environment": "calculator", "turn_tokens": 64}

    def test_every_argument_matters(self):
        pytest.skip("not tried: a model without training calls no tools; see the tests below")


def played(environment="guess", *, prompts=None, generation=None, **settings):
    """What episodes with the tiny model give."""
    model = tiny_model()
    model.tokenizer = DigitTokenizer()
    usual = {"responses_per_prompt": 3, "max_new_tokens": 24, "temperature": 0.8}
    interface = EpisodesInterface(
        environment=environment, generation=usual | (generation or {}), **settings
    )
    return interface.generate(model, prompts or make_batch(["packed_prompts"]), SPEC)


def columns(output):
    """For each sequence its tokens, which of them were sampled, and their log-probs."""
    lengths = output.flat_seqlens("packed_input_ids")
    return zip(
        output.data["packed_input_ids"].split(lengths),
        (~output.data["prompt_mask"]).split(lengths),
        output.data["packed_logprobs"].split([length - 1 for length in lengths]),
        strict=True,
    )


def test_episodes_of_one_turn_equal_plain_responses_bit_for_bit():
    settings = GenerationHyperparameters(responses_per_prompt=3, max_new_tokens=5, temperature=0.8)
    prompts, model = make_batch(["packed_prompts"]), tiny_model()
    model.tokenizer = DigitTokenizer()
    plain = GenerationInterface(generation=settings).generate(model, prompts, SPEC)
    episodes = EpisodesInterface(environment="calculator", max_turns=1, generation=settings)
    output = episodes.generate(model, prompts, SPEC)
    assert output.keys == {*KEYS, "forks"}
    for key in KEYS:
        assert output.seqlens[key] == plain.seqlens[key]
        assert torch.equal(output.data[key], plain.data[key])
    assert not output.data["forks"].any()


def test_exactly_the_sampled_tokens_are_trained_on(answers_with):
    environment = answers_with("return Observation('77')")
    output = played(environment, turn_tokens=4, max_turns=3)
    observed = torch.tensor(DigitTokenizer().encode("77"))
    prompts = make_batch(["packed_prompts"])
    starts = prompts.data["packed_prompts"].split(prompts.flat_seqlens("packed_prompts"))
    for number, (tokens, sampled, logprobs) in enumerate(columns(output)):
        prompt = starts[number // 3]
        assert torch.equal(tokens[: len(prompt)], prompt)
        assert not sampled[: len(prompt)].any()
        assert sampled[-1]
        between = tokens[len(prompt) :][~sampled[len(prompt) :]]
        assert torch.equal(between, observed.repeat(2))
        assert torch.equal(logprobs != 0, sampled[1:])


def test_the_first_turn_does_not_depend_on_what_follows(answers_with):
    environment = answers_with("return Observation('7')")
    short = list(columns(played(environment, turn_tokens=4, max_turns=1)))
    long = list(columns(played(environment, turn_tokens=4, max_turns=4)))
    for (first, _, _), (tokens, _, _) in zip(short, long, strict=True):
        assert torch.equal(tokens[: len(first)], first)


def test_episodes_that_are_over_are_counted():
    with heard_work() as heard:
        count = len(list(columns(played())))
    assert heard.counts[-1] == Count(count, count, "episodes")


@pytest.mark.parametrize(
    ("settings", "stop"),
    [({"max_turns": 2}, "out_of_turns"), ({"max_turns": 99}, "out_of_tokens"),
     ({"max_turns": 99, "max_seconds": 1e-9}, "out_of_time")],
)  # fmt: skip
def test_an_episode_that_does_not_end_is_cut_off(answers_with, settings, stop):
    output = played(answers_with("return Observation('7')"), turn_tokens=4, **settings)
    assert output.data["seq_no_eos_mask"].all()
    assert set(output.metadata[stop]) == {(3.0, 3)}


def test_no_episode_is_longer_than_its_limit(answers_with):
    output = played(answers_with("return Observation('7' * 50)"), turn_tokens=4, max_turns=9)
    prompts = make_batch(["packed_prompts"]).flat_seqlens("packed_prompts")
    for number, (tokens, _, _) in enumerate(columns(output)):
        assert len(tokens) <= prompts[number // 3] + 24


def test_rewards_of_turns_and_of_the_end_add_up(answers_with):
    environment = answers_with(
        "self.turns += 1\n        return Observation('7', reward=0.5, done=self.turns == 3)",
        "def score(self, answer):\n        return 2.0",
    )
    output = played(environment, turn_tokens=4, max_turns=9, scored=True, turn_rewards=True)
    assert output.data["rewards"].tolist() == [3.5] * len(output.data["rewards"])
    assert not output.data["seq_no_eos_mask"].any()
    lengths = output.flat_seqlens("packed_input_ids")
    for dense, (_, sampled, _) in zip(
        output.data["dense_rewards"].split(lengths), columns(output), strict=True
    ):
        assert dense[~sampled].count_nonzero() == 0
        assert dense[dense != 0].tolist() == [0.5, 0.5, 2.5]
        assert dense[-1] == 2.5


def test_rewards_of_turns_alone_include_that_of_the_end(answers_with):
    environment = answers_with(
        "return Observation('', done=True)", "def score(self, answer):\n        return 2.0"
    )
    output = played(environment, turn_tokens=4, max_turns=2, turn_rewards=True)
    rewards = output.data["dense_rewards"]
    assert rewards[rewards != 0].tolist() == [2.0] * len(output.flat_seqlens("packed_input_ids"))


def test_turns_draw_with_different_random_numbers(answers_with):
    """So hot that the model decides nothing, they would otherwise all be the same."""
    hot = {"temperature": 1e4, "min_new_tokens": 5}
    output = played(
        answers_with("return Observation('7')"), turn_tokens=5, max_turns=3, generation=hot
    )
    for tokens, sampled, _ in columns(output):
        pairs = zip(tokens.tolist(), sampled.tolist(), strict=True)
        runs = itertools.groupby(pairs, key=itemgetter(1))
        turns = [tuple(run) for is_sampled, run in runs if is_sampled]
        assert len(set(turns)) == len(turns) > 1


def test_the_episodes_of_a_group_begin_in_the_same_state(answers_with):
    environment = answers_with(
        "return Observation('', reward=float(self.seed % 1000), done=True)",
        "def reset(self, row, seed):\n        self.seed = seed",
    )
    rewards = played(environment, scored=True).data["rewards"].view(-1, 3)
    assert (rewards == rewards[:, :1]).all()
    assert len(set(rewards[:, 0].tolist())) > 1


def test_a_reset_may_replace_the_prompt(answers_with):
    environment = answers_with(
        "return Observation(done=True)", "def reset(self, row, seed):\n        return '123'"
    )
    for tokens, sampled, _ in columns(played(environment)):
        assert DigitTokenizer().decode(tokens[~sampled]) == "123"


def test_a_row_has_its_answer_and_its_prompt_as_text(answers_with):
    environment = answers_with(
        "return Observation(done=True)",
        "def reset(self, row, seed):\n        return row['prompt'] + row['answer']",
    )
    prompts = make_batch(["packed_prompts"], metadata={"answer": ["8"] * 8})
    texts = prompts.data["packed_prompts"].split(prompts.flat_seqlens("packed_prompts"))
    for number, (tokens, sampled, _) in enumerate(columns(played(environment, prompts=prompts))):
        decode = DigitTokenizer().decode
        assert decode(tokens[~sampled]) == decode(texts[number // 3], True) + "8"


@pytest.mark.parametrize(
    ("step", "fault"),
    [("return Observation('', reward=float('nan'))", "nan, which is not a finite number"),
     ("return Observation('', reward='1')", "'1', which is not a finite number"),
     ("return Observation('', reward=5.0, done=True)", "the reward is 5, but REWARDS is")],
)  # fmt: skip
def test_a_wrong_reward_is_the_fault_of_the_environment(answers_with, step, fault):
    environment = answers_with(step, "REWARDS = (0.0, 1.0)")
    with pytest.raises(ProjectError, match=fault):
        played(environment, scored=True)


@pytest.mark.parametrize("step", ["return Observation(done=True)", "return 1 / 0"])
def test_every_environment_is_closed(answers_with, tmp_path, step):
    file = tmp_path / "closed"
    environment = answers_with(
        step, f"def close(self):\n        open({str(file)!r}, 'a').write('x')"
    )
    with contextlib.suppress(ProjectError):
        played(environment)
    assert len(file.read_text()) == 3 * make_batch(["packed_prompts"]).bs


def test_ranks_that_share_a_model_play_only_what_can_be_repeated(answers_with):
    model = tiny_model()
    model.tokenizer = DigitTokenizer()
    model.device_mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"), shape=(1, 2))
    prompts = make_batch(["packed_prompts"])
    game = answers_with("return Observation(done=True)")
    with pytest.raises(UsageError, match=r"share a model \(tp\): it is not REPRODUCIBLE"):
        EpisodesInterface(environment=game).generate(model, prompts, SPEC)
    with pytest.raises(UsageError, match="max_seconds is set"):
        EpisodesInterface(environment="guess", max_seconds=5.0).generate(model, prompts, SPEC)
    EpisodesInterface(environment="guess").generate(model, prompts, SPEC)


def test_turns_leave_room_for_more_unless_their_length_is_set(answers_with):
    """A turn has a quarter of the 24 tokens: three, with what is observed, always fit."""
    output = played(answers_with("return Observation('7')"), max_turns=4)
    assert min(turns for turns, _ in output.metadata["turns"]) >= 3 * 3
    single = played(answers_with("return Observation('7')"), max_turns=4, turn_tokens=24)
    assert set(single.metadata["turns"]) == {(3 * 1.0, 3)}


def test_a_turn_that_is_shorter_than_the_shortest_response_is_refused():
    with pytest.raises(ValueError, match="turn_tokens is 2"):
        played(turn_tokens=2, generation={"min_new_tokens": 3})


class Speaker(ReadingTokenizer):
    """The tokenizer of a model that always says the same."""

    says = ""

    def decode(self, ids, skip_special_tokens=False):
        return self.says


def heard(says, **settings):
    """What a policy that says this in its first turn has observed after it."""
    model, tokenizer = tiny_model(vocab=97), Speaker()
    model.tokenizer, tokenizer.says = tokenizer, says
    generation = {"max_new_tokens": 6000, "min_new_tokens": 1}
    interface = EpisodesInterface(
        environment="calculator", max_turns=2, turn_tokens=2, generation=generation, **settings
    )
    prompts = make_batch(["packed_prompts"], [[(2, 1)]])
    output = interface.generate(model, prompts, SPEC)
    ((tokens, sampled, _),) = columns(output)
    observed = TinyTokenizer().decode(tokens[2:][~sampled[2:]])
    return observed, {name: values[0][0] for name, values in output.metadata.items()}


UNREADABLE = "error: a tool call cannot be read"


def call(**call):
    return json.dumps(call)


@pytest.mark.parametrize(
    ("says", "observed", "mistakes"),
    [
        (call(name="calculate", arguments={"expression": "12+7"}), "19", 0),
        ('I call {"name": "calculate", "arguments": {"expression": "1"}} now', "1", 0),
        (call(name="calculate", arguments={"expression": 7}), "error: calculate: expression is", 1),
        (call(name="exec", arguments={}), "error: there is no tool 'exec'", 1),
        (call(name="calculate", arguments=[]), f"{UNREADABLE}: its arguments must be", 1),
        ('{"name": "calculate", "arg', f"{UNREADABLE}: it is not valid JSON", 1),
    ],
)  # fmt: skip
def test_a_policy_reads_what_its_calls_return_or_what_is_wrong(says, observed, mistakes):
    text, numbers = heard(says)
    assert text.startswith(observed)
    assert (numbers["tool_calls"], numbers["tool_mistakes"]) == (2, 2 * mistakes)


@pytest.mark.parametrize("says", ["the answer is 4", "{" * 100_000, '{"a":' * 50_000])
def test_a_text_without_a_call_ends_the_episode(says):
    assert heard(says)[1]["turns"] == 1


def test_calls_of_a_turn_are_limited():
    five = call(name="calculate", arguments={"expression": "5"})
    text, numbers = heard(five * 80)
    assert text.count("5") == MOST_CALLS
    assert "only 64 tool calls of a turn are read" in text
    assert numbers["tool_mistakes"] == 2


def test_of_what_a_tool_returns_the_middle_is_left_out():
    long = call(name="calculate", arguments={"expression": "+".join(["999999999"] * 60)})
    assert len(heard(long, max_observation=3)[0]) == 5


@pytest.mark.parametrize(
    ("longest", "observed"), [(1, "0…"), (4, "01…89"), (9, "01234…6789"), (10, "0123456789")]
)
def test_a_long_observation_has_its_beginning_and_its_end(longest, observed):
    environment = SimpleNamespace(step=lambda action: Observation("0123456789"))
    answering = AnsweringEnvironment(lambda: environment, longest)
    assert answering.answer({"call": "step", "action": ""})["value"][0] == observed


@pytest.fixture
def answers_with(tmp_path, monkeypatch):
    """The function that makes a game of the source of its `step`, and of further members."""
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    folder = tmp_path / "interfaces" / "environments"
    folder.mkdir(parents=True)

    def make(step, *members):
        name = f"zz_game_{next(NUMBERS)}"
        lines = [*members, f"def step(self, action):\n        {step}"]
        (folder / f"{name}.py").write_text(
            "from rlcli.api.environment import Environment, Observation, register_environment\n\n\n"
            "class Game(Environment):\n    turns = 0\n\n    "
            + "\n\n    ".join(lines)
            + f"\n\n\nregister_environment({name!r}, Game)\n"
        )
        return name

    return make
