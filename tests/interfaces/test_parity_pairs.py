"""Losses and gradients of DPO, SimPO, KTO and reward models are those of TRL's trainers, on one
tiny model and batch.

TRL pads a batch to a rectangle, rlcli packs it; nothing but the weights and the tokens is shared.
Log-probs of the reference are computed by each for itself.
"""

import copy
import random

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import call_interface
from rlcli.interfaces.dpo import DPOInterface
from rlcli.interfaces.kto import KTOInterface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.interfaces.reward_model import RewardModelInterface
from rlcli.testing.tiny_models import END, VOCABULARY, tiny_model
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

from . import trl_parity
from .trl_parity import TOLERANCE, check_equal, role, with_weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of the libraries that TRL calls

LENGTHS = ((3, 4, 6), (1, 1, 1), (5, 12, 2), (2, 1, 9), (9, 7, 0), (4, 0, 5), (2, 6, 6))
"""(prompt, chosen, rejected) in tokens: ragged, of one token, and with nothing to train on."""


def drawn_rows(lengths=LENGTHS):
    """Token ids as TRL's collators take them; every other answer was cut off before its end."""
    rng = random.Random(4)

    def text(length, ends):
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(length)]
        return [*tokens[:-1], END] if ends and length > 1 else tokens

    return [
        {"prompt_ids": text(p, False), "chosen_ids": text(c, n % 2), "rejected_ids": text(r, n % 3)}
        for n, (p, c, r) in enumerate(lengths)
    ]


def as_batch(rows, **columns):
    """The same rows, packed."""
    sequences = [
        [row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")] for row in rows
    ]
    masks = [
        torch.arange(len(s)) < len(row["prompt_ids"])
        for row, two in zip(rows, sequences, strict=True)
        for s in two
    ]
    lengths = [[len(sequence) for sequence in two] for two in sequences]
    keys = {
        "packed_input_ids": lengths,
        "prompt_mask": lengths,
        **{key: [[1, 1]] * len(rows) for key in columns},
    }
    return SequenceSample.from_default(
        ids=[f"r{n}" for n in range(len(rows))],
        seqlens=keys,
        data={
            "packed_input_ids": torch.tensor(
                [t for two in sequences for sequence in two for t in sequence]
            ),
            "prompt_mask": torch.cat(masks),
            **columns,
        },
    )


def ours(interface, module, batch):
    return trl_parity.ours(interface, module, batch, micro_batches=2)


def theirs(trainer, module, inputs):
    """(loss, gradients by name) of the trainer's own loss."""
    module = with_weights(trainer.model, module)
    loss = trainer.compute_loss(module, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in module.named_parameters()}


def reported_by(trainer):
    """The trainer's own metrics, of training or evaluation as its model is in the one mode or the
    other."""
    return {name: values[-1] for mode in trainer._metrics.values() for name, values in mode.items()}


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl")


@pytest.fixture
def common(tmp_path):
    """The arguments that any trainer needs."""
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_length": None,
        "gradient_checkpointing": False,
    }


@pytest.fixture
def policy():
    return tiny_model(seed=1)


@pytest.fixture
def reference():
    return tiny_model(seed=2)


@pytest.fixture
def with_reference(reference):
    """Rows as a batch with the log-probs of our reference."""

    def make(rows):
        batch = as_batch(rows)
        batch.update_(
            call_interface(ReferenceInterface(), "inference", role(reference, "inference"), batch)
        )
        return batch

    return make


@pytest.fixture
def dpo_trainer(trl, common, policy, reference):
    from datasets import Dataset

    def make(**settings):
        return trl.DPOTrainer(
            copy.deepcopy(policy),
            ref_model=copy.deepcopy(reference),
            args=trl.DPOConfig(**common, **settings),
            train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
            processing_class=as_transformers(byte_tokenizer()),
        )

    return make


@pytest.fixture
def cpo_trainer(trl, common, policy):
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    def make(**settings):
        return CPOTrainer(
            copy.deepcopy(policy),
            args=CPOConfig(**{**common, "max_length": 64}, **settings),
            train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
            processing_class=as_transformers(byte_tokenizer()),
        )

    return make


@pytest.mark.parametrize(
    ("settings", "of_trl"),
    [
        ({"beta": 0.3}, {"loss_type": ["sigmoid"]}),
        ({"loss": "ipo", "length_normalized": True, "beta": 0.3}, {"loss_type": ["ipo"]}),
        ({"loss": "hinge", "beta": 0.3}, {"loss_type": ["hinge"]}),
        (
            {"loss": "robust", "label_smoothing": 0.2, "beta": 0.3},
            {"loss_type": ["robust"], "label_smoothing": 0.2},
        ),
        ({"length_normalized": True, "beta": 0.3}, {"loss_type": ["sigmoid_norm"]}),
        (
            {"nll_coef": 0.7, "nll_aggregation": "token", "beta": 0.3},
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
        ),
    ],
    ids=["dpo", "ipo", "hinge", "robust", "length-normalised", "rpo"],
)
def test_dpo_equals_trl(dpo_trainer, policy, with_reference, settings, of_trl):
    rows = drawn_rows()
    trainer = dpo_trainer(beta=0.3, **of_trl)
    expected = theirs(trainer, policy, trainer.data_collator.torch_call(rows))
    mine = ours(DPOInterface(**settings), policy, with_reference(rows))
    check_equal(mine, expected)
    reported = reported_by(trainer)
    for name, key in (
        ("rewards/chosen", "chosen_reward"),
        ("rewards/rejected", "rejected_reward"),
        ("rewards/margins", "margin"),
        ("rewards/accuracies", "accuracy"),
        ("logps/chosen", "chosen_logprob"),
        ("logps/rejected", "rejected_logprob"),
    ):
        # theirs are sums there too
        if not (settings.get("length_normalized") and "rewards" in name):
            assert mine[0][key] == pytest.approx(reported[name], rel=TOLERANCE, abs=TOLERANCE), name


def test_label_smoothing_equals_trl(dpo_trainer, policy, with_reference):
    """TRL smooths labels in `aot`, which is DPO's loss where a batch is one pair."""
    rows = drawn_rows()
    trainer = dpo_trainer(beta=0.3, loss_type=["aot"], label_smoothing=0.2)
    parts = [theirs(trainer, policy, trainer.data_collator.torch_call([row])) for row in rows]
    loss = sum(loss for loss, _ in parts) / len(rows)
    gradients = {
        name: sum(gradients_of_row[name] for _, gradients_of_row in parts) / len(rows)
        for name in parts[0][1]
    }
    mine = ours(DPOInterface(beta=0.3, label_smoothing=0.2), policy, with_reference(rows))
    check_equal(mine, (loss, gradients))


def test_a_pair_without_tokens_counts_in_trl_but_not_in_rlcli(dpo_trainer, policy, with_reference):
    """TRL averages its constant in; it has no gradient."""
    rows = drawn_rows()
    empty = drawn_rows([(4, 0, 0)])
    trainer = dpo_trainer(beta=0.3)
    loss, gradients = theirs(trainer, policy, trainer.data_collator.torch_call(rows + empty))
    share = len(rows) / (len(rows) + 1)
    expected = (loss - (1 - share) * 0.6931472) / share
    mine = ours(DPOInterface(beta=0.3), policy, with_reference(rows + empty))
    check_equal(mine, (expected, {name: gradient / share for name, gradient in gradients.items()}))


@pytest.mark.parametrize(
    ("settings", "of_trl"),
    [
        (
            {"length_normalized": True, "gamma": 1.0},
            {"loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        ),
        (
            {"length_normalized": True, "gamma": 0.5, "nll_coef": 0.3, "nll_aggregation": "token"},
            {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.3},
        ),
        (
            {"label_smoothing": 0.2},
            {"loss_type": "sigmoid", "label_smoothing": 0.2, "cpo_alpha": 0.0},
        ),
        ({"loss": "ipo", "length_normalized": True}, {"loss_type": "ipo", "cpo_alpha": 0.0}),
    ],
    ids=["simpo", "simpo-nll", "smoothed", "ipo"],
)
def test_reference_free_losses_equal_trl(cpo_trainer, policy, settings, of_trl):
    # theirs is NaN for an answer without a token
    rows = drawn_rows([lengths for lengths in LENGTHS if all(lengths)])
    trainer = cpo_trainer(beta=2.0, **of_trl)
    features = []
    for row in rows:
        feature = {
            "prompt_input_ids": row["prompt_ids"],
            "prompt_attention_mask": [1] * len(row["prompt_ids"]),
        }
        for side in ("chosen", "rejected"):
            tokens = row["prompt_ids"] + row[f"{side}_ids"]
            feature |= {f"{side}_input_ids": tokens, f"{side}_attention_mask": [1] * len(tokens)}
            feature[f"{side}_labels"] = [-100] * len(row["prompt_ids"]) + row[f"{side}_ids"]
        features.append(feature)
    expected = theirs(trainer, policy, trainer.data_collator(features))
    mine = ours(DPOInterface(reference_free=True, beta=2.0, **settings), policy, as_batch(rows))
    check_equal(mine, expected)


@pytest.mark.parametrize("centering", [0.0, 0.05])
@pytest.mark.parametrize("with_margins", [False, True], ids=["", "margins"])
def test_the_reward_model_equals_trl(trl, common, centering, with_margins):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification

    rows = drawn_rows()
    for row in rows:  # theirs are whole sequences
        row |= {side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")}
        row["prompt_ids"] = []
    margins = torch.linspace(-1, 2, len(rows))
    scorer = tiny_model(head="value", seed=1)
    scorer.score.bias.data.zero_()  # theirs has none
    their_model = AutoModelForSequenceClassification.from_config(copy.deepcopy(scorer.config))
    their_model.load_state_dict({k: v for k, v in scorer.state_dict().items() if k != "score.bias"})
    trainer = trl.RewardTrainer(
        their_model,
        args=trl.RewardConfig(**common, center_rewards_coefficient=centering or None),
        train_dataset=Dataset.from_list([{"chosen_ids": [5], "rejected_ids": [6]}]),
        processing_class=as_transformers(byte_tokenizer()),
    )
    examples = [
        {**row, "margin": float(m)} if with_margins else row
        for row, m in zip(rows, margins, strict=True)
    ]
    expected = theirs(trainer, their_model.eval(), trainer.data_collator(examples))
    batch = as_batch(rows, margins=torch.stack([margins, torch.zeros_like(margins)], 1).flatten())
    interface = RewardModelInterface(centering=centering, use_margins=with_margins)
    mine = ours(interface, scorer, batch)
    check_equal(mine, expected)
    for key in ("accuracy", "margin"):
        assert mine[0][key] == pytest.approx(reported_by(trainer)[key], abs=TOLERANCE)


def judged_rows():
    """Token ids as TRL's collator takes them: each prompt with its answer, and with another's."""
    drawn = [row for row, (_, chosen, _) in zip(drawn_rows(), LENGTHS, strict=True) if chosen]
    neighbours = [*drawn[1:], drawn[0]]
    return [
        {
            "prompt_ids": row["prompt_ids"],
            "completion_ids": row["chosen_ids"],
            "KL_completion_ids": neighbour["chosen_ids"],
            "label": number % 3 != 1,
        }
        for number, (row, neighbour) in enumerate(zip(drawn, neighbours, strict=True))
    ]


def packed_answers(rows, answer):
    """A sequence for each row: its prompt, and the answer of that name."""
    tokens, masks, lengths = [], [], []
    for row in rows:
        prompt, completion = row["prompt_ids"], row[answer]
        tokens += prompt + completion
        masks += [True] * len(prompt) + [False] * len(completion)
        lengths.append([len(prompt + completion)])
    return SequenceSample.from_default(
        ids=[f"r{number}" for number in range(len(rows))],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={"packed_input_ids": torch.tensor(tokens), "prompt_mask": torch.tensor(masks)},
    )


def as_judged_batch(rows, reference):
    """The same rows with the log-probs of our reference."""
    matched, mismatched = (packed_answers(rows, f"{kind}completion_ids") for kind in ("", "KL_"))
    for batch in (matched, mismatched):
        batch.update_(
            call_interface(ReferenceInterface(), "inference", role(reference, "inference"), batch)
        )
    mismatched.remap_keys_(
        {
            "packed_input_ids": "mismatched_input_ids",
            "prompt_mask": "mismatched_prompt_mask",
            "packed_ref_logprobs": "mismatched_ref_logprobs",
        }
    )
    matched.update_(mismatched)
    labels = torch.tensor([row["label"] for row in rows])
    matched.update_(
        SequenceSample.from_default(
            ids=matched.ids, seqlens={"desirable": [[1]] * len(rows)}, data={"desirable": labels}
        )
    )
    return matched


@pytest.fixture
def kto_trainer(trl, common):
    from datasets import Dataset

    def make(policy, reference, **settings):
        return trl.KTOTrainer(
            copy.deepcopy(policy),
            ref_model=copy.deepcopy(reference),
            args=trl.KTOConfig(**common, **settings),
            train_dataset=Dataset.from_list(
                [{"prompt": "a", "completion": "b", "label": True}] * 2
            ),
            processing_class=as_transformers(byte_tokenizer()),
        )

    return make


REPORTED_BY_KTO = {
    "kl": "kl",
    "rewards/chosen": "desirable_reward",
    "rewards/rejected": "undesirable_reward",
    "rewards/margins": "margin",
    "logps/chosen": "desirable_logprob",
    "logps/rejected": "undesirable_logprob",
}


@pytest.mark.parametrize(
    ("settings", "of_trl", "is_far"),
    [
        ({}, {}, True),
        ({}, {}, False),
        ({"desirable_weight": 1.5, "undesirable_weight": 0.4}, None, True),
        ({"loss": "apo_zero_unpaired"}, {"loss_type": "apo_zero_unpaired"}, True),
    ],
    ids=["kto", "kl-below-0", "weights", "apo-zero"],
)
def test_kto_equals_trl(kto_trainer, policy, reference, settings, of_trl, is_far):
    """`is_far`: the policy likes the mismatched answers better than the reference does, so that the
    estimate of the KL is above 0."""
    if not is_far:
        policy, reference = reference, policy
    rows = judged_rows()
    trainer = kto_trainer(policy, reference, beta=0.3, **(settings if of_trl is None else of_trl))
    expected = theirs(trainer, policy, trainer.data_collator(rows))
    interface = KTOInterface(beta=0.3, **settings)
    mine = ours(interface, policy, as_judged_batch(rows, reference))
    check_equal(mine, expected)
    stats, reported = {"kl": 0.0, **mine[0]}, reported_by(trainer)
    assert (stats["kl"] > 0) == (is_far and interface.loss == "kto")
    for name, key in REPORTED_BY_KTO.items():
        assert stats[key] == pytest.approx(reported[name], rel=TOLERANCE, abs=TOLERANCE), name
