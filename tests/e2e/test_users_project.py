"""Components of a user's own, in a project of their own: written once, named in a recipe, run."""

import json
from pathlib import Path

import pytest

TINY = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    "max_position_embeddings: 128}"
)
EXAMPLE = Path(__file__).parents[1] / "interfaces" / "custom_interface_example.txt"

MASKED_ROWS = '''
"""Three short rows with a mask of their own."""

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


ITERATED_ROWS = MASKED_ROWS.replace("class MaskedRows:", "class MaskedRows(torch.utils.data.IterableDataset):").replace(
    "    def __getitem__(self, i):",
    "    def __iter__(self):\n        return map(self.row, range(8))\n\n    def row(self, i):",
)
"""The same as one of the documented kinds of datasets, which can only be iterated."""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    for kind in ("interfaces", "datasets", "recipes"):
        (tmp_path / kind).mkdir()
    return tmp_path


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("launch", "rows"), [
    ((), MASKED_ROWS), (("launch=local", "cluster.devices_per_node=2"), ITERATED_ROWS),
], ids=["inline", "two ranks, iterated"])  # fmt: skip
def test_the_custom_interface_of_areals_documentation(project, warm_command, launch, rows):
    (project / "interfaces" / "custom.py").write_text(EXAMPLE.read_text())
    (project / "datasets" / "masked_rows.py").write_text(rows)
    (project / "recipes" / "custom.yaml").write_text(
        f"models: {{actor: {{scratch: {TINY}, tokenizer: 'builtin:arithmetic', backend: "
        "{type: fsdp, args: {lr: 1e-2, dtype: float32}}}}\n"
        "datasets: {train: masked-rows}\n"
        "graph:\n"
        "  train: {model: actor, call: train_step, interface: {type: custom, args: {custom_param: 2.0}},\n"
        "          inputs: [packed_input_ids, mask]}\n"
        "train: {steps: 6, prompts_per_step: 8}\n"
    )
    done = warm_command("train", "custom", "--run-dir", "out", *launch, cwd=project)
    assert done.returncode == 0, done.stderr
    losses = [record["actor/loss"] for record in records(project / "out")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (project / "out" / "models" / "actor" / "model.safetensors").is_file()


def test_a_sentiment_classifier_rewards_ppo_by_one_line(project, warm_command):
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from rlcli.registry import load

    torch.manual_seed(0)
    tokenizer = load("datasets", "arithmetic").make_tokenizer()
    classifier = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, num_labels=2, pad_token_id=0,
        )
    )  # fmt: skip
    classifier.save_pretrained(project / "sentiment")
    tokenizer.save_pretrained(project / "sentiment")
    (project / "recipes" / "nice.yaml").write_text(
        "extends: base/ppo\n"
        f"models: {{actor: {{scratch: {TINY}, tokenizer: 'builtin:arithmetic'}}}}\n"
        "datasets: {train: {type: arithmetic, args: {problems: 16}}}\n"
        "generation: {max_new_tokens: 5, responses_per_prompt: 2}\n"
        "train: {steps: 1, prompts_per_step: 4}\n"
        "graph:\n"
        "  reward_inf: {interface: {type: hf_reward, args: {path: sentiment}}}\n"
    )
    done = warm_command("train", "nice", "--run-dir", "out", cwd=project)
    assert done.returncode == 0, done.stderr
    [record] = records(project / "out")
    assert record["actor/reward"] != 0
    rewards = {json.loads(line)["reward"] for line in (project / "out" / "samples.jsonl").read_text().splitlines()}
    assert len(rewards) > 1
    pooled = warm_command("train", "nice", "--run-dir", "pooled", "models.reward.backend=cpu_pool", cwd=project)
    assert pooled.returncode == 0, pooled.stderr
    [other] = records(project / "pooled")
    clocks = ("time/", "tokens_per_second")
    assert other.keys() == record.keys()
    assert all(other[name] == value for name, value in record.items() if not name.startswith(clocks))
