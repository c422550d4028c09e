"""Components of a user in a project: written once, named in a recipe, and run."""

import json
from pathlib import Path

import pytest

TINY = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, "
    "num_attention_heads: 2, max_position_embeddings: 128}"
)
EXAMPLE = Path(__file__).parents[1] / "interfaces" / "custom_interface_example.txt"

MASKED_ROWS = '''
"""Short rows with a custom mask."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset


@register_dataset("masked-rows")
@dataclass
class MaskedRows:
    """Rows for the custom interface."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "mask")

    util: DatasetUtility

    def __len__(self):
        return 8

    def __getitem__(self, i):
        tokens = torch.tensor(self.util.tokenizer(f"What is {i}+{i}?").input_ids)
        return SequenceSample.from_default(
            ids=[f"row-{i}"],
            seqlens={"packed_input_ids": [len(tokens)], "mask": [len(tokens) - 1]},
            data={"packed_input_ids": tokens, "mask": torch.arange(len(tokens) - 1) % 2 == 0},
        )
'''


ITERATED_ROWS = MASKED_ROWS.replace(
    "class MaskedRows:", "class MaskedRows(torch.utils.data.IterableDataset):"
).replace(
    "    def __getitem__(self, i):",
    "    def __iter__(self):\n        return map(self.row, range(8))\n\n    def row(self, i):",
)
"""The same as an iterable dataset, one of the documented kinds."""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    for kind in ("interfaces", "datasets", "recipes"):
        (tmp_path / kind).mkdir()
    return tmp_path


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launch", "rows"),
    [
        ((), MASKED_ROWS),
        (("launch=local", "cluster.devices_per_node=2"), ITERATED_ROWS),
    ],
    ids=["inline", "two ranks, iterated"],
)
def test_the_custom_interface_of_the_documentation_of_areal_trains(
    project, warm_command, launch, rows
):
    (project / "interfaces" / "custom.py").write_text(EXAMPLE.read_text())
    (project / "datasets" / "masked_rows.py").write_text(rows)
    (project / "recipes" / "custom.yaml").write_text(
        f"models: {{actor: {{scratch: {TINY}, tokenizer: 'builtin:arithmetic', backend: {{type: "
        "fsdp, args: {lr: 1e-2, dtype: float32}}}}\n"
        "datasets: {train: masked-rows}\n"
        "graph:\n"
        "  train: {model: actor, call: train_step, interface: {type: custom, args: {custom_param: "
        "2.0}},\n"
        "          inputs: [packed_input_ids, mask]}\n"
        "train: {steps: 6, prompts_per_step: 8}\n"
    )
    done = warm_command("train", "custom", "--run-dir", "out", *launch, cwd=project)
    assert done.returncode == 0, done.stderr
    losses = [record["actor/loss"] for record in records(project / "out")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (project / "out" / "models" / "actor" / "model.safetensors").is_file()


@pytest.fixture
def classifier(project):
    """A folder named `sentiment`."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from rlcli.registry import load

    torch.manual_seed(0)
    tokenizer = load("datasets", "arithmetic").make_tokenizer()
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=2,
            pad_token_id=0,
        )
    )
    model.save_pretrained(project / "sentiment")
    tokenizer.save_pretrained(project / "sentiment")


PPO = (
    "extends: base/ppo\n"
    f"models: {{actor: {{scratch: {TINY}, tokenizer: 'builtin:arithmetic'}}}}\n"
    "datasets: {train: {type: arithmetic, args: {problems: 16}}}\n"
    "generation: {max_new_tokens: 5, responses_per_prompt: 2}\n"
    "train: {steps: 1, prompts_per_step: 4}\n"
)


@pytest.mark.exhaustive
def test_a_sentiment_classifier_gives_rewards_for_ppo(project, classifier, warm_command):
    reward = "graph: {reward_inf: {interface: {type: hf_reward, args: {path: sentiment}}}}\n"
    (project / "recipes" / "nice.yaml").write_text(PPO + reward)
    done = warm_command("train", "nice", "--run-dir", "out", cwd=project)
    assert done.returncode == 0, done.stderr
    [record] = records(project / "out")
    assert record["reward/reward"] != 0
    rewards = {
        json.loads(line)["reward"]
        for line in (project / "out" / "samples.jsonl").read_text().splitlines()
    }
    assert len(rewards) > 1
    pooled = warm_command(
        "train", "nice", "--run-dir", "pooled", "models.reward.backend=cpu_pool", cwd=project
    )
    assert pooled.returncode == 0, pooled.stderr
    [in_pool] = records(project / "pooled")
    clocks = ("time/", "tokens_per_second", "perf/")
    assert in_pool.keys() == record.keys()
    assert all(
        in_pool[name] == value for name, value in record.items() if not name.startswith(clocks)
    )


RECIPE = (
    f"models: {{actor: {{scratch: {TINY}, tokenizer: 'builtin:arithmetic', backend: BACKEND}}}}\n"
    "datasets: {train: masked-rows}\n"
    "graph:\n"
    "  train: {model: actor, call: train_step, interface: {type: custom, args: {custom_param: "
    "2.0}},\n"
    "          inputs: [packed_input_ids, mask]}\n"
    "train: {steps: 6, prompts_per_step: 8}\n"
)

BACKEND = """
import torch

from rlcli.api.model import ModelBackend, PipelinableEngine, register_backend


class Output:
    def __init__(self, module, batch):
        tokens, lengths = batch.data["packed_input_ids"], batch.flat_seqlens("packed_input_ids")
        scores = [module(one[None]).logits[0, :-1].log_softmax(-1) for one in tokens.split(lengths)]
        following = [one[1:, None] for one in tokens.split(lengths)]
        self.logprobs = torch.cat([own.gather(1, ids)[:, 0] for own, ids in zip(scores, following)])


class FSDPEngine(PipelinableEngine):
    def __init__(self, module):
        self.module = module
        self.optimizer = torch.optim.AdamW(list(module.parameters()), lr=1e-2)

    def train_batch(
        self, input_, loss_fn, loss_weight_fn, token_normalize_scope, mb_spec, version_steps
    ):
        self.optimizer.zero_grad()
        loss = loss_fn(Output(self.module, input_), input_) / loss_weight_fn(input_)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def save_to_hf(self, tokenizer, save_dir):
        self.module.save_pretrained(save_dir)
        tokenizer.save_pretrained(save_dir)


class FSDPBackend(ModelBackend):

    def _initialize(self, model):
        module = model.source.load(model.device)
        model.module: PipelinableEngine = FSDPEngine(module)
        return model

register_backend("my_fsdp", FSDPBackend)
"""


@pytest.fixture
def documented_project(project):
    """A project with the custom interface, backend and dataset of the documentation."""
    (project / "backends").mkdir()
    (project / "backends" / "my_fsdp.py").write_text(BACKEND)
    (project / "interfaces" / "custom.py").write_text(EXAMPLE.read_text())
    (project / "datasets" / "masked_rows.py").write_text(MASKED_ROWS)
    (project / "recipes" / "custom.yaml").write_text(RECIPE.replace("BACKEND", "my_fsdp"))
    return project


@pytest.mark.exhaustive
def test_the_backend_of_the_documentation_of_areal_trains(documented_project, warm_command):
    done = warm_command("train", "custom", "--run-dir", "out", cwd=documented_project)
    assert done.returncode == 0, done.stderr
    losses = [record["actor/loss"] for record in records(documented_project / "out")]
    assert losses[-1] < losses[0]
    assert (documented_project / "out" / "models" / "actor" / "model.safetensors").is_file()
    assert "the backend of actor has no state(): this run cannot be resumed" in done.stderr


@pytest.mark.long
def test_a_backend_that_expects_a_loaded_model_gets_a_hint(documented_project, warm_command):
    text = BACKEND.replace("model.source.load(model.device)", "model.module")
    (documented_project / "backends" / "my_fsdp.py").write_text(text)
    done = warm_command("train", "custom", "--run-dir", "out", cwd=documented_project)
    assert done.returncode == 2
    line = (
        text.splitlines().index(
            "        self.optimizer = torch.optim.AdamW(list(module.parameters()), lr=1e-2)"
        )
        + 1
    )
    assert f"my_fsdp.py:{line}" in done.stderr
    assert "model.source.load(model.device)" in done.stderr


@pytest.mark.long
def test_an_experiment_class_is_refused_with_a_hint_about_recipes(documented_project, warm_command):
    lines = "from rlcli.api.config import PPOConfig\n\n\nclass MyPPOConfig(PPOConfig):\n    ...\n"
    (documented_project / "interfaces" / "custom.py").write_text(lines + EXAMPLE.read_text())
    done = warm_command("train", "custom", "--run-dir", "out", cwd=documented_project)
    assert done.returncode == 2
    assert "custom.py:1: rlcli has no PPOConfig" in done.stderr
    assert "rlcli cp ppo_math mine.yaml" in " ".join(done.stderr.split())


SENTIMENT = """
import dataclasses

import torch
import transformers

from rlcli.api import model as model_api
from rlcli.api.data import SequenceSample


@dataclasses.dataclass
class SentimentScoringInterface(model_api.ModelInterface):

    def __post_init__(self):
        super().__post_init__()
        self.score_model = (
            transformers.AutoModelForSequenceClassification.from_pretrained(
                "sentiment"
            )
        )
        self.score_model.eval()
        self.score_tokenizer = transformers.AutoTokenizer.from_pretrained(
            "sentiment"
        )

    @torch.no_grad()
    def inference(
        self, model: model_api.Model, input_: SequenceSample
    ) -> SequenceSample:
        bs = input_.bs
        input_ids = input_.data["packed_input_ids"].split(input_.flat_seqlens("packed_input_ids"))
        # Re-tokenize the texts.
        texts = model.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        encoding = self.score_tokenizer(
            texts, return_tensors="pt", padding=True, truncation=True
        )
        logits = self.score_model(
            input_ids=encoding["input_ids"],
            attention_mask=encoding["attention_mask"],
        ).logits
        scores = logits[..., -1].contiguous().float()

        res = SequenceSample.from_default(
            ids=input_.ids,
            seqlens=[1 for _ in range(bs)],
            data=dict(rewards=scores),
        )
        return res


model_api.register_interface("sentiment_scoring", SentimentScoringInterface)
"""


@pytest.mark.exhaustive
def test_the_sentiment_interface_of_the_documentation_of_realhf_runs(
    project, classifier, warm_command
):
    (project / "interfaces" / "sentiment_scoring.py").write_text(SENTIMENT)
    (project / "recipes" / "nice.yaml").write_text(
        PPO.replace("responses_per_prompt: 2", "responses_per_prompt: 1")
        + "graph:\n  reward_inf:\n    interface: {type: sentiment_scoring}\n"
    )
    refused = warm_command("train", "nice", "--run-dir", "out", cwd=project)
    assert refused.returncode == 2
    assert "sentiment_scoring does not declare what inference reads and writes" in refused.stderr
    with (project / "recipes" / "nice.yaml").open("a") as recipe:
        recipe.write("    inputs: [packed_input_ids]\n    outputs: [rewards]\n")
    done = warm_command("train", "nice", "--run-dir", "out", cwd=project)
    assert done.returncode == 0, done.stderr
    [record] = records(project / "out")
    assert record["reward/reward"] != 0


PAIRS = '''
"""Pairs of answers for a reward model."""

import json

import torch

from rlcli.api import data as data_api


class MyDataset(torch.utils.data.Dataset):

    def __init__(self, util: data_api.DatasetUtility, max_length: int, dataset_path: str):
        self.util = util
        self.rows = [json.loads(line) for line in open(dataset_path)]
        self.ids = [f"row-{i}" for i in range(len(self.rows))]
        self.max_length = max_length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        row = self.rows[idx]
        prompt_len = len(self.util.tokenizer(row["prompt"]).input_ids)
        sequences = [
            self.util.tokenizer(row["prompt"] + answer).input_ids[: self.max_length]
            for pair in zip(row["pos_answers"], row["neg_answers"])
            for answer in pair
        ]
        packed_input_ids, input_lens = sum(sequences, []), [len(one) for one in sequences]
        return data_api.SequenceSample(
            keys=["packed_input_ids", "prompt_lens"],
            data=dict(
                packed_input_ids=torch.tensor(packed_input_ids, dtype=torch.long),
                prompt_lens=torch.tensor([prompt_len], dtype=torch.int32),
            ),
            ids=[self.ids[idx]],
            seqlens=dict(
                packed_input_ids=[torch.tensor(input_lens, dtype=torch.int32)],
                prompt_lens=[torch.tensor([1], dtype=torch.int32)],
            ),
        )


data_api.register_dataset("my-dataset", MyDataset)
'''


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "dataset",
    [
        "{type: my-dataset, args: {max_length: 64, dataset_path: pairs.jsonl}}",
        "{type: paired, args: {path: pairs.jsonl}}",
    ],
    ids=["its own class", "the file format"],
)
def test_the_dataset_of_pairs_of_the_documentation_of_realhf_trains(project, warm_command, dataset):
    rows = [
        {"prompt": f"{i}+1=", "pos_answers": [f"{i + 1}"], "neg_answers": [f"{i}"]}
        for i in range(8)
    ]
    (project / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "datasets" / "my_dataset.py").write_text(PAIRS)
    (project / "recipes" / "rw.yaml").write_text(
        "extends: base/reward_model\n"
        f"models: {{reward: {{scratch: {TINY}, tokenizer: 'builtin:arithmetic', backend: {{type: "
        "fsdp, args: {lr: 1e-2}}}}\n"
        f"datasets: {{train: {dataset}}}\n"
        "train: {steps: 8, prompts_per_step: 8}\n"
    )
    done = warm_command("train", "rw", "--run-dir", "out", cwd=project)
    assert done.returncode == 0, done.stderr
    margins = [record["reward/margin"] for record in records(project / "out")]
    assert margins[-1] > margins[0]
