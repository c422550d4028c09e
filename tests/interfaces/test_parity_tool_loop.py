"""Episodes with tools are those of TRL's tool loop: two loops that a script drives through the same
turns record the same tokens, of which they train on the same ones, with the same log-probs,
advantages, loss and gradients.

Only the prompt is shared, because each describes a tool in JSON of its own. Calls that cannot be
read are not compared: TRL ends such an episode, and ours answers it.
"""

import copy
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from chat_templates import byte_level, public_templates, sampled

from rlcli.api.chat_template import DAY, conversation_tokens
from rlcli.api.data import SequenceSample
from rlcli.api.environment import schemas_of
from rlcli.api.key_meaning import MESSAGES
from rlcli.api.model import FinishedResponse, MicroBatchSpec
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.environments.calculator import Calculator
from rlcli.interfaces.episodes import EpisodesInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.ops import advantages
from rlcli.testing.tiny_engine import TinyStream
from rlcli.testing.tiny_engine import tiny_model as tiny_role
from rlcli.testing.tiny_models import tiny_model
from rlcli.testing.tokenizer import as_transformers

from .training import rate, with_settings
from .trl_parity import TOLERANCE, check_equal, near, ours, role, with_logprobs, with_weights

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

END = "<|im_end|>"
LONGEST = 2000
QUESTIONS = ("How much is 12+7?", "Add 3 and 4, then 5 to it.")


def call(expression):
    arguments = f'{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}'
    return f"<tool_call>\n{arguments}\n</tool_call>"


EPISODES = (
    ("It is 19.",),
    (call("12+7"), "So it is 19."),
    (f"Both ways: {call('12+7')}\n{call('7+12')}", "The same: 19."),
    (call("12+6"), call("18+1"), call("19"), "19"),
    (call("3+4"), call("7+5"), "12"),
    ("I think that it is\n 12 ",),
    (f"ünïcödé first {call('3+4+5')}", "It is 12, but I go on and on"),
    ("and on without an end",),
)
"""The turns of four episodes for each question."""
CUT_OFF = (6, 7)
"""Those whose last turn has no end."""
REWARDS = (1.0, 1.0, 0.5, 1.0, 1.0, 0.0, 0.25, 0.0)
GROUP = 4


class Policy:
    """Says its lines, whichever loop asks; knows an episode by what it has read and said there."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._so_far = []
        self._lines = [list(lines) for lines in EPISODES]

    def answer(self, ids):
        number = self._episode(ids)
        text = self._lines[number].pop(0)
        tokens = sampled(self.tokenizer, text)
        if self._lines[number] or number not in CUT_OFF:
            tokens.append(self.tokenizer.convert_tokens_to_ids(END))
        self._so_far[number] = ids + tokens
        return tokens

    def _episode(self, ids):
        for number, earlier in enumerate(self._so_far):
            if ids[: len(earlier)] == earlier:
                return number
        self._so_far.append(ids)
        return len(self._so_far) - 1


class Script(TinyStream):
    """The policy as the stream of an engine."""

    def __init__(self, policy):
        self._policy, self._asked, self._count = policy, [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, prompt, seed):
        self._asked.append((self._count, prompt.tolist()))
        self._count += 1
        return self._count - 1

    def collect(self, until=lambda: False):
        asked, self._asked = self._asked, []
        return [self._response(number, self._policy.answer(ids)) for number, ids in asked]

    def _response(self, number, tokens):
        ended = tokens[-1] == self._policy.tokenizer.convert_tokens_to_ids(END)
        return FinishedResponse(number, torch.tensor(tokens), torch.zeros(len(tokens)), ended, ())

    def spans(self, response):
        return None


class Scripted:
    unused = nullcontext

    def __init__(self, policy):
        self._policy = policy

    def open(self, tokenizer, settings, longest_prompt):
        return Script(self._policy)


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl")


@pytest.fixture(scope="module")
def tokenizer(trl):
    return byte_level(public_templates()["qwen2_5"])


@pytest.fixture(scope="module")
def sampler(tokenizer):
    module = tiny_model(seed=1, max_position_embeddings=4096)
    torch.manual_seed(1)
    module.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return near(module, 1, 0.1)


@pytest.fixture(scope="module")
def trained(sampler):
    return near(sampler, 2, 0.02)


@pytest.fixture(scope="module")
def reference(sampler):
    return near(sampler, 3, 0.03)


@pytest.fixture(scope="module")
def episodes(tokenizer):
    """The batch that our loop records."""
    model = tiny_role(tokenizer)
    model.module = Scripted(Policy(tokenizer))
    interface = EpisodesInterface(
        environment="calculator",
        generation={"max_new_tokens": LONGEST, "responses_per_prompt": GROUP},
        turn_tokens=200,
    )
    prompts = SequenceSample.from_default(
        ids=["a", "b"],
        seqlens=[2, 2],
        data={"packed_prompts": torch.tensor([3, 4, 5, 6])},
        metadata={MESSAGES: [as_messages(question) for question in QUESTIONS]},
    )
    batch = interface.generate(model, prompts, MicroBatchSpec())
    rewards = SequenceSample.from_default(
        ids=batch.ids,
        seqlens={"rewards": [[1] * GROUP] * 2},
        data={"rewards": torch.tensor(REWARDS)},
    )
    batch.update_(rewards)
    return batch


def as_messages(question):
    return [{"role": "user", "content": question}]


def calculate(expression: str) -> str:
    """Work out a sum.

    Args:
        expression: Numbers and signs.
    """
    return Calculator().calculate(expression)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """The tokens that each episode begins with, with our description of the tool."""
    tools = list(schemas_of(Calculator).values())
    how = {"tools": tools, "add_generation_prompt": True, "day": DAY}
    questions = [question for question in QUESTIONS for _ in range(GROUP)]
    return [conversation_tokens(tokenizer, as_messages(question), **how) for question in questions]


@pytest.fixture
def trainer(trl, tmp_path, tokenizer, sampler, prompts):
    """The function that makes a trainer of TRL with a tool, whose policy is that of the script."""
    from datasets import Dataset

    processor = as_transformers(tokenizer)
    processor.eos_token, processor.pad_token = END, "<bos>"
    common = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "num_iterations": 2,
        "per_device_train_batch_size": len(prompts),
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "gradient_checkpointing": False,
    }

    def make(**settings):
        trains = trl.GRPOTrainer(
            copy.deepcopy(sampler),
            reward_funcs=[lambda prompts, completions, **_: list(REWARDS)],
            args=trl.GRPOConfig(**common, **settings),
            train_dataset=Dataset.from_list([{"prompt": as_messages("?")}] * len(prompts)),
            processing_class=processor,
            tools=[calculate],
        )
        policy = Policy(tokenizer)
        trains._tokenize_prompts = lambda _: (copy.deepcopy(prompts), None, {})
        trains._generate_single_turn = lambda ids, *_, **__: (list(map(policy.answer, ids)), None)
        return trains

    return make


@pytest.fixture
def theirs(trainer, reference, trained, monkeypatch):
    """What TRL's loop records and makes of it: inputs of its loss, loss, gradients by name."""
    monkeypatch.setattr(advantages, "SCALE_EPS", 1e-4)  # theirs

    def of(beta=0.0, **settings):
        trains = trainer(beta=0.0, **settings)
        trains.beta = beta
        trains.ref_model = with_weights(copy.deepcopy(trains.model), reference)
        trains.current_gradient_accumulation_steps = 1
        trains.model.train()
        rows = [{"prompt": as_messages("?")}] * len(REWARDS)
        inputs = trains._generate_and_score_completions(rows)
        module = with_weights(trains.model, trained)
        loss = trains._compute_loss(module, inputs)
        loss.backward()
        return inputs, float(loss.detach()), {n: p.grad for n, p in module.named_parameters()}

    return of


def sequences(inputs):
    """The tokens of each of TRL's episodes, and which of them it trains on."""
    tokens, trained = [], []
    for row in range(len(REWARDS)):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        is_there = inputs["completion_mask"][row].bool()
        completion = inputs["completion_ids"][row][is_there].tolist()
        tokens.append(prompt + completion)
        trained.append([0] * len(prompt) + inputs["tool_mask"][row][is_there].tolist())
    return tokens, trained


def test_both_loops_record_the_same_tokens_and_masks(theirs, episodes):
    inputs, *_ = theirs()
    tokens, trained = sequences(inputs)
    assert episodes.flat_seqlens("packed_input_ids") == [len(each) for each in tokens]
    assert episodes.data["packed_input_ids"].tolist() == [*chain(*tokens)]
    assert (~episodes.data["prompt_mask"]).int().tolist() == [*chain(*trained)]
    assert not episodes.data["forks"].any()


CASES = {
    "grpo": (
        {"kl_ctl": 0.3, "loss_aggregation": "sequence"},
        {"loss_type": "grpo", "beta": 0.3},
    ),
    "dapo": (
        {"kl_ctl": 0.0, "eps_clip_high": 0.28, "loss_aggregation": "token"},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "gspo": (
        {
            "policy_loss": "gspo",
            "eps_clip": 0.02,
            "eps_clip_high": 0.03,
            "kl_ctl": 0.0,
            "loss_aggregation": "sequence",
        },
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.02,
            "epsilon_high": 0.03,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_advantages_loss_and_gradients_equal_those_of_trl(
    theirs, episodes, sampler, reference, trained, case
):
    settings, of_trl = CASES[case]
    batch = with_logprobs(
        episodes.select(episodes.keys), packed_logprobs=sampler, packed_ref_logprobs=reference
    )
    settings = {"minibatches": 1, "early_stop_imp_ratio": None, **settings}
    rater, policy = with_settings(settings, GroupRelativeInterface, PPOActorInterface)
    rated, _ = rate(rater, role(sampler, "inference"), batch)
    inputs, loss, gradients = theirs(**of_trl)
    assert_same_actions(rated, inputs)
    mine = ours(policy, trained, rated, micro_batches=3)
    assert mine[0]["clip_fraction"] > 0, "or the clip is not compared"
    check_equal(mine, (loss, gradients))


def assert_same_actions(rated, inputs):
    """Those that are trained on have the same log-probs and advantages."""
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    mask = rated.data["loss_mask"]
    is_trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    logprobs = inputs["old_per_token_logps"][is_trained]
    torch.testing.assert_close(rated.data["old_logprobs"][mask], logprobs, **close)
    expected = inputs["advantages"][:, None].expand(is_trained.shape)[is_trained]
    torch.testing.assert_close(rated.data["advantages"][mask], expected, **close)
