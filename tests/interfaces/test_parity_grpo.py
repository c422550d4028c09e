"""Losses and gradients of GRPO and its family, PPO and SFT are those of TRL's trainers, on one tiny
model and rollout.

Theirs is TRL's own code from the responses on: advantages, log-probs of the old policy and of the
reference, loss. It pads where rlcli packs, so nothing but weights, tokens and rewards is shared.
Each test names the conventions in which the two differ on purpose.
"""

import copy
import random

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import call_interface
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.interfaces.rewards.weighted_sum import WeightedSumInterface
from rlcli.interfaces.sft import SFTInterface
from rlcli.ops import advantages
from rlcli.testing.tiny_models import END, VOCABULARY, tiny_model
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

from . import trl_parity
from .training import rate, with_settings
from .trl_parity import check_equal, near, role, with_logprobs, with_weights

LIMIT = 8
"""Longest response: one of so many tokens was cut off."""
PROMPTS = (3, 1, 6)
RESPONSES = ((5, 1, 8, 3), (2, 2, 1, 7), (8, 4, 8, 6))
REWARDS = (1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.25)
"""Of four responses to each prompt; those to the second are alike."""
GROUP = 4
OF_GRPO = {
    "minibatches": 1,
    "early_stop_imp_ratio": None,
    "loss_aggregation": "sequence",
    "overlong_limit": LIMIT,
}


class Rollout:
    """Recorded tokens: ragged, of one token, and cut off."""

    def __init__(self, responses=RESPONSES):
        rng = random.Random(7)
        self.lengths = [length for group in responses for length in group]
        self.prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in PROMPTS]
        self.responses = [
            [
                *(rng.randrange(3, VOCABULARY) for _ in range(length - 1)),
                rng.randrange(3, 90) if length == LIMIT else END,
            ]
            for length in self.lengths
        ]
        self.prompt_of = [self.prompts[i // GROUP] for i in range(len(self.responses))]

    def batch(self):
        """As rlcli packs it, with rewards and without log-probs."""
        whole = [
            [len(p) + n for p, n in self._pairs()[i : i + GROUP]]
            for i in range(0, len(self.lengths), GROUP)
        ]
        ones = [[1] * GROUP for _ in whole]
        masks = [torch.arange(len(p) + n) < len(p) for p, n in self._pairs()]
        rows = zip(self.prompt_of, self.responses, strict=True)
        return SequenceSample.from_default(
            ids=[f"p{n}" for n in range(len(whole))],
            seqlens={
                "packed_input_ids": whole,
                "prompt_mask": whole,
                "rewards": ones,
                "seq_no_eos_mask": ones,
            },
            data={
                "packed_input_ids": torch.tensor(
                    [token for prompt, response in rows for token in prompt + response]
                ),
                "prompt_mask": torch.cat(masks),
                "rewards": torch.tensor(REWARDS),
                "seq_no_eos_mask": torch.tensor([length == LIMIT for length in self.lengths]),
            },
        )

    def _pairs(self):
        return list(zip(self.prompt_of, self.lengths, strict=True))


@pytest.fixture(scope="module")
def sampler():
    return tiny_model(seed=1)


@pytest.fixture(scope="module")
def trained(sampler):
    """So far from the policy that sampled that some of its ratios are clipped."""
    return near(sampler, 2, 0.03)


@pytest.fixture(scope="module")
def reference(sampler):
    return near(sampler, 3, 0.04)


def ours(interface, module, batch):
    return trl_parity.ours(interface, module, batch, micro_batches=3)


def our_grpo(settings, module, batch):
    advantages, policy = with_settings(
        {**OF_GRPO, **settings}, GroupRelativeInterface, PPOActorInterface
    )
    rated, _ = rate(advantages, role(module, "inference"), batch)
    return ours(policy, module, rated)


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl")


@pytest.fixture
def theirs(trl, tmp_path, sampler, reference, trained, monkeypatch):
    """(loss, gradients by name) of a trainer of TRL that is given the recorded responses and
    rewards."""
    from datasets import Dataset

    monkeypatch.setattr(advantages, "SCALE_EPS", 1e-4)  # theirs

    def of(
        kind="GRPO",
        rollout=None,
        beta=0.0,
        more_rewards=(),
        change=lambda trainer: None,
        **settings,
    ):
        rollout = rollout or Rollout()
        common = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "num_iterations": 2,
            "per_device_train_batch_size": len(rollout.responses),
            "num_generations": GROUP,
            "beta": 0.0,
            "max_completion_length": LIMIT,
            "gradient_checkpointing": False,
        }
        trainer = getattr(trl, f"{kind}Trainer")(
            copy.deepcopy(sampler),
            reward_funcs=[lambda prompts, completions, **_: list(REWARDS), *more_rewards],
            args=getattr(trl, f"{kind}Config")(**{**common, **settings}),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rollout.responses)),
            processing_class=as_transformers(byte_tokenizer()),
        )
        trainer.beta = beta
        trainer.ref_model = with_weights(copy.deepcopy(trainer.model), reference)
        trainer.current_gradient_accumulation_steps = 1
        trainer._tokenize_prompts = lambda prompts: (rollout.prompt_of, None, {})
        answers = (rollout.responses, None) if kind == "GRPO" else rollout.responses
        trainer._generate_single_turn = lambda *_: answers
        change(trainer)
        trainer.model.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rollout.responses))
        module = with_weights(trainer.model, trained)
        loss = trainer._compute_loss(module, inputs)
        loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in module.named_parameters()}

    return of


def overlong(trl):
    from trl.rewards import get_soft_overlong_punishment

    return get_soft_overlong_punishment(max_completion_len=LIMIT, soft_punish_cache=4)


GRPO_CASES = {
    "grpo": ({"kl_ctl": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "grpo, naive": (
        {"kl_ctl": 0.3, "kl_gradient": "naive"},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "grpo by batch": (
        {"scale": "batch", "kl_ctl": 0.0},
        {"loss_type": "grpo", "scale_rewards": "batch"},
    ),
    "dr_grpo": (
        {"scale": "none", "loss_aggregation": "constant", "loss_constant": 8.0, "kl_ctl": 0.0},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "dapo": (
        {"kl_ctl": 0.0, "eps_clip_high": 0.28, "loss_aggregation": "token"},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "gspo": (
        {"policy_loss": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03, "kl_ctl": 0.0},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.02,
            "epsilon_high": 0.03,
        },
    ),
    "cispo": (  # their bound is that of the ratio itself, and there is none below
        {
            "policy_loss": "cispo",
            "eps_clip": 1.0,
            "eps_clip_high": 0.1,
            "loss_aggregation": "token",
            "kl_ctl": 0.0,
        },
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "sapo": (
        {"policy_loss": "sapo", "tau_pos": 0.7, "tau_neg": 1.4, "kl_ctl": 0.0},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4},
    ),
    "dual clip": (
        {"eps_clip": 0.05, "c_clip": 1.1, "loss_aggregation": "token", "kl_ctl": 0.0},
        {"loss_type": "bnpo", "epsilon": 0.05, "delta": 1.1},
    ),
    "entropy": (
        {"entropy_coef": 0.2, "loss_aggregation": "token", "kl_ctl": 0.0},
        {"loss_type": "bnpo", "entropy_coef": 0.2},
    ),
}


@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo_equals_trl(theirs, sampler, reference, trained, case):
    settings, of_trl = GRPO_CASES[case]
    batch = with_logprobs(Rollout().batch(), packed_logprobs=sampler, packed_ref_logprobs=reference)
    mine = our_grpo(settings, trained, batch)
    if case not in ("entropy", "dr_grpo", "grpo by batch", "sapo"):
        assert mine[0]["clip_fraction"] > 0, "or the clip is not compared"
    check_equal(mine, theirs(**of_trl))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_truncated_responses_are_masked_as_in_trl(theirs, trl, sampler, trained, loss_type):
    """With the soft penalty on long ones, too. TRL's mean over responses counts those that are
    masked whole, and ours does not."""
    aggregation = {
        "grpo": {"loss_aggregation": "sequence"},
        "dapo": {"loss_aggregation": "token"},
        "dr_grpo": {"loss_aggregation": "constant", "loss_constant": 8.0},
    }[loss_type]
    settings = {"kl_ctl": 0.0, "mask_too_long": True, "overlong_buffer": 4, **aggregation}
    batch = with_logprobs(Rollout().batch(), packed_logprobs=sampler)
    mine = our_grpo(settings, trained, batch)
    other = theirs(
        loss_type=loss_type, mask_truncated_completions=True, more_rewards=[overlong(trl)]
    )
    cut = sum(length == LIMIT for group in RESPONSES for length in group)
    check_equal(mine, other, factor=12 / (12 - cut) if loss_type == "grpo" else 1.0)


BETWEEN_ENGINES = {
    "token": ("token_truncate", None, 1.02, {"behav_imp_weight_mode": "truncate"}),
    "icepop": ("token_mask", 0.98, 1.02, {}),
    "mis": ("sequence_mask", 0.8, 1.25, {"behav_imp_weight_level": "sequence"}),
    "sequence": (
        "sequence_truncate",
        0.95,
        1.02,
        {"behav_imp_weight_level": "sequence", "behav_imp_weight_mode": "truncate"},
    ),
}


def as_with_vllm(rollout, logprobs, mode, floor, cap):
    """What makes a trainer of TRL take these log-probs [A] for those of an inference engine."""
    ends = zip(logprobs, rollout.lengths, strict=True)
    answers = (rollout.responses, [row[-length:].tolist() for row, length in ends])

    def change(trainer):
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = mode
        trainer.vllm_importance_sampling_clip_min = floor
        trainer.vllm_importance_sampling_clip_max = cap
        trainer._generate_single_turn = lambda *_: answers

    return change


@pytest.mark.parametrize("case", BETWEEN_ENGINES)
def test_weights_between_engines_equal_those_of_trl(theirs, sampler, trained, case):
    """Between what an inference engine says that it sampled with and what the trainer finds. TRL
    divides by the number of all tokens, and ours by those that are left."""
    mode, floor, cap, settings = BETWEEN_ENGINES[case]
    bounds = {"behav_imp_weight_cap": cap, "behav_imp_weight_floor": floor}
    settings = {"use_decoupled_loss": True, "kl_ctl": 0.0, **bounds, **settings}
    rollout, engine = Rollout(), near(sampler, 4, 0.02)
    batch = with_logprobs(rollout.batch(), packed_logprobs=engine, proximal_logprobs=sampler)
    rated, _ = rate(GroupRelativeInterface(**settings), role(sampler, "inference"), batch)
    left, every = int(rated.data["loss_mask"].sum()), sum(rollout.lengths)
    assert (0 < left < every) == mode.endswith("mask")
    mine = our_grpo({**settings, "loss_aggregation": "token"}, trained, batch)
    logprobs = batch.data["packed_logprobs"].split(batch.flat_seqlens("packed_logprobs"))
    change = as_with_vllm(rollout, logprobs, mode, floor, cap)
    check_equal(mine, theirs(loss_type="dapo", change=change), factor=every / left)


def test_gdpo_equals_trl(theirs, sampler, trained):
    """Each of two rewards is normalised in its group, before they are added up."""
    brevity = [-float(length) for group in RESPONSES for length in group]
    batch = with_logprobs(Rollout().batch(), packed_logprobs=sampler)
    rewards = batch.select(["rewards"])
    rewards.data["rewards"] = torch.tensor(brevity)
    rewards.remap_keys_({"rewards": "brevity"})
    batch.remap_keys_({"rewards": "correct"})
    batch.update_(rewards)
    both = WeightedSumInterface(weights={"correct": 1.0, "brevity": 0.5}, group_norm=True)
    batch.update_(call_interface(both, "inference", role(sampler, "inference"), batch))
    mine = our_grpo({"baseline": "batch", "scale": "batch", "kl_ctl": 0.0}, trained, batch)
    gdpo = theirs(
        loss_type="grpo",
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=[1.0, 0.5],
        more_rewards=[lambda prompts, completions, **_: brevity],
    )
    check_equal(mine, gdpo)


@pytest.mark.parametrize(("beta", "epsilon"), [(0.0, 0.2), (0.2, 0.02)])
def test_rloo_equals_trl(theirs, sampler, reference, trained, beta, epsilon):
    """A response is one action; the KL penalty, k1, is in its reward."""
    settings = {
        "baseline": "leave_one_out",
        "scale": "none",
        "policy_loss": "sequence",
        "loss_aggregation": "constant",
        "loss_constant": 1.0,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_ctl": beta,
        "eps_clip": epsilon,
    }
    batch = with_logprobs(Rollout().batch(), packed_logprobs=sampler, packed_ref_logprobs=reference)
    mine = our_grpo(settings, trained, batch)
    check_equal(mine, theirs("RLOO", beta=beta, epsilon=epsilon))


def test_sft_equals_trl(trl, tmp_path, trained):
    """Of answers that are ragged, of one token, and empty, whose rows are all prompt."""
    from datasets import Dataset

    rollout = Rollout()
    rows = [(p, r) for p, r in zip(rollout.prompt_of, rollout.responses, strict=True)]
    rows[5] = (rows[5][0] + rows[5][1], [])
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    examples = [
        {"input_ids": p + r, "completion_mask": [0] * len(p) + [1] * len(r)} for p, r in rows
    ]
    trainer = trl.SFTTrainer(
        copy.deepcopy(trained),
        args=trl.SFTConfig(
            **arguments,
            max_length=None,
            completion_only_loss=True,
            loss_type="nll",
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=as_transformers(byte_tokenizer()),
    )
    module = with_weights(trainer.model, trained)
    loss = trainer.compute_loss(module, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    lengths = [[len(p) + len(r)] for p, r in rows]
    batch = SequenceSample.from_default(
        ids=[f"r{n}" for n in range(len(rows))],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={
            "packed_input_ids": torch.tensor([token for p, r in rows for token in p + r]),
            "prompt_mask": torch.cat([torch.arange(len(p) + len(r)) < len(p) for p, r in rows]),
        },
    )
    mine = ours(SFTInterface(), trained, batch)
    check_equal(
        mine, (float(loss.detach()), {name: p.grad for name, p in module.named_parameters()})
    )


# -- PPO -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def critics():
    """(the one that valued the rollout, the one that is trained)"""
    old = tiny_model(head="value", seed=4)
    return old, near(old, 5, 0.05)


@pytest.fixture
def of_ppo(trl, tmp_path, sampler, reference, trained, critics, monkeypatch):
    """(loss, gradients by name) of the policy and of the critic, in the first step of TRL's PPO;
    its own code from the responses and their scores on."""
    from datasets import Dataset

    ppo = pytest.importorskip("trl.experimental.ppo", reason="TRL 1.13 has no PPO")
    ppo_trainer = ppo.ppo_trainer

    def rectangle(rows, left):
        width = max(map(len, rows))
        return torch.tensor(
            [[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows]
        )

    def of(rollout, **settings):
        queries = rectangle(rollout.prompt_of, left=True)
        texts = torch.cat([queries, rectangle(rollout.responses, left=False)], 1)
        one = Dataset.from_list([{"input_ids": [3]}] * len(rollout.responses))
        rows = {
            "per_device_train_batch_size": len(texts),
            "local_rollout_forward_batch_size": len(texts),
        }
        trainer = ppo.PPOTrainer(
            args=ppo.PPOConfig(
                output_dir=str(tmp_path),
                use_cpu=True,
                bf16=False,
                report_to="none",
                total_episodes=len(texts),
                num_mini_batches=1,
                num_ppo_epochs=1,
                response_length=LIMIT,
                num_sample_generations=0,
                lam=1.0,
                temperature=1.0,
                save_strategy="no",
                disable_tqdm=True,
                gradient_checkpointing=False,
                **rows,
                **settings,
            ),
            processing_class=as_transformers(byte_tokenizer()),
            model=copy.deepcopy(trained).requires_grad_(True),
            ref_model=copy.deepcopy(reference),
            reward_model=torch.nn.Linear(1, 1),
            train_dataset=one,
            eval_dataset=one,
            value_model=copy.deepcopy(critics[1]).requires_grad_(True),
        )
        gradients, logged, rewarded = {}, {}, ppo_trainer.get_reward

        def responses(model, given, *_):
            logits = ppo_trainer.forward(sampler, texts, 0).logits
            return texts, logits[:, given.shape[1] - 1 : -1].clone()

        def scores(model, *inputs):
            return (
                (None, torch.tensor(REWARDS), None)
                if model is trainer.reward_model
                else rewarded(critics[0], *inputs)
            )

        def step():
            for name, module in (
                ("policy", trainer.model.policy),
                ("critic", trainer.model.value_model),
            ):
                gradients[name] = {
                    key: p.grad.clone()
                    for key, p in module.named_parameters()
                    if p.grad is not None
                }

        monkeypatch.setattr(ppo_trainer, "batch_generation", torch.no_grad()(responses))
        monkeypatch.setattr(ppo_trainer, "get_reward", scores)
        trainer.dataloader, trainer.optimizer.step, trainer.log = (
            [{"input_ids": queries}],
            step,
            logged.update,
        )
        trainer.train()
        return (logged["loss/policy_avg"], gradients["policy"]), (
            logged["loss/value_avg"],
            gradients["critic"],
        )

    return of


def of_last_states(rollout, old, trained, clip):
    """(sum of TRL's value loss over the states after the last tokens of responses shorter than the
    longest, gradients by name, their number): its mean counts these, and ours does not."""
    module, total, count = copy.deepcopy(trained).requires_grad_(True), torch.zeros(()), 0
    for prompt, response, score in zip(rollout.prompt_of, rollout.responses, REWARDS, strict=True):
        if len(response) < LIMIT:
            before, now = (
                m(torch.tensor([prompt + response])).logits[0, -1, 0] for m in (old, module)
            )
            near_before = torch.clamp(now, before.detach() - clip, before.detach() + clip)
            total = total + 0.5 * torch.maximum((now - score) ** 2, (near_before - score) ** 2)
            count += 1
    total.backward()
    return (
        float(total.detach()),
        {name: p.grad for name, p in module.named_parameters() if p.grad is not None},
        count,
    )


def test_ppo_equals_trl(of_ppo, sampler, reference, trained, critics):
    """Their standard deviation is the unbiased one, with its epsilon inside the root: a factor of
    all advantages. They put the score, and a value to learn, one state later; without discounting
    (and with lambda 1) the returns are the same."""
    rollout = Rollout()
    policy, (value_loss, value_gradients) = of_ppo(
        rollout, kl_coef=0.1, kl_estimator="k3", cliprange=0.05, cliprange_value=0.1, vf_coef=1.0
    )
    batch = with_logprobs(rollout.batch(), packed_logprobs=sampler, packed_ref_logprobs=reference)
    critic = PPOCriticInterface(minibatches=1, value_norm=False, value_eps_clip=0.1)
    batch.update_(call_interface(critic, "inference", role(critics[0], "inference"), batch))
    normalised, raw = (
        rate(
            GAEInterface(kl_ctl=0.1, kl_estimator="k3", bootstrap_no_eos=False, adv_norm=adv_norm),
            role(trained, "inference"),
            batch,
        )[0]
        for adv_norm in (True, False)
    )
    raw = raw.data["advantages"][raw.data["loss_mask"]].double()
    mine = ours(
        PPOActorInterface(minibatches=1, early_stop_imp_ratio=None, eps_clip=0.05),
        trained,
        normalised,
    )
    assert mine[0]["clip_fraction"] > 0
    check_equal(
        mine, policy, factor=float((raw.var() + 1e-8).sqrt() / (raw.std(correction=0) + 1e-5))
    )
    extra, extra_gradients, count = of_last_states(rollout, *critics, 0.1)
    tokens = len(raw)
    expected = {
        name: (gradient * (tokens + count) - extra_gradients[name]) / tokens
        for name, gradient in value_gradients.items()
    }
    mine = ours(critic, critics[1], normalised)
    assert mine[0]["value_clip_fraction"] > 0
    check_equal(mine, ((value_loss * (tokens + count) - extra) / tokens, expected))
