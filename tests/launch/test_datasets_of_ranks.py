"""Which ranks open which datasets, and with whose tokenizer their rows are read and shown."""

import json

import pytest
import torch

from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.worker import ModelWorker
from rlcli.topology.placement import plan_topology

CRITIC = "  critic: {init: actor, head: value, backend: toy}\n"
CRITIC_OF_ANOTHER_FAMILY = (
    "  critic: {scratch: {model_type: llama, hidden_size: 8, intermediate_size: 8, "
    "num_hidden_layers: 1, num_attention_heads: 1}, tokenizer: builtin:arithmetic, head: "
    "value, backend: toy}\n"
)


@pytest.mark.parametrize(
    ("settings", "opened"),
    [
        ((), [{"train", "held_out"}, {"train", "held_out"}]),
        (("models.actor.devices='0'",), [{"train", "held_out"}, set()]),
        (
            ("models.actor.devices='1'", "models.critic.devices='0'"),
            [{"train", "held_out"}, {"train", "held_out"}],
        ),
    ],
    ids=["everywhere", "generation on rank 0", "generation on rank 1"],
)
def test_a_rank_opens_only_the_datasets_it_reads_and_rank_0_opens_all(project, settings, opened):
    overrides = [
        "launch=local",
        "cluster.devices_per_node=2",
        "models.reward.devices='0'",
        *settings,
    ]
    recipe = load_recipe("toy.yaml", overrides).recipe
    for rank, expected in enumerate(opened):
        worker = ModelWorker(
            recipe, plan_topology(recipe), rank, torch.device("cpu"), {}, lambda *report: None
        )
        worker.open_datasets()
        assert set(worker.datasets.opened) == expected


def test_samples_are_decoded_with_the_tokenizer_of_their_prompts(project, train):
    """The recipe's first role has another."""
    recipe = (project / "toy.yaml").read_text()
    assert CRITIC in recipe
    others_first = recipe.replace(CRITIC, "").replace(
        "models:\n", f"models:\n{CRITIC_OF_ANOTHER_FAMILY}"
    )
    (project / "toy.yaml").write_text(others_first)
    _, folder = train("train.steps=1", "train.eval.at_start=false")
    first = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    words = f"{first['prompt']} {first['response']}".split()
    assert words
    assert all(word.startswith("w") for word in words)
