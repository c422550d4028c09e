"""Where a role's config.json is found: folders, models from scratch, warm starts, the local Hub
cache, or nowhere."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from rlcli.recipe.components import declared
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.architecture import Architecture
from rlcli.topology.configs import KNOWN_CONFIGS, architecture_of, cached_folder
from rlcli.topology.lengths import lengths_of, longest_row

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}
PARAMETERS = 26848


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """An empty folder, an empty Hub cache, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def refuse(*_args, **_options):
        raise AssertionError("a plan must not touch the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def sizes(role: str = "actor", *overrides: str, recipe: str = "sft_math") -> Architecture | str:
    return architecture_of(load_recipe(recipe, overrides), role)


def model_path(path: str) -> str:
    return f"models.actor={{_replace_: true, path: {path}}}"


def write_config(folder, config=CONFIG) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def test_the_config_of_a_model_folder_is_read(tmp_path):
    write_config(tmp_path / "model")
    assert sizes("actor", model_path("model")).parameters() == PARAMETERS


def test_a_multimodal_model_is_sized_by_its_text_model(tmp_path):
    write_config(
        tmp_path / "model",
        {"model_type": "gemma3", "text_config": {**CONFIG, "model_type": "gemma3_text"}},
    )
    assert sizes("actor", model_path("model")).model_type == "gemma3_text"


def test_a_model_from_scratch_has_the_vocabulary_of_its_tokenizer(tmp_path):
    assert sizes().vocabulary == 380
    assert sizes("actor", "models.actor.scratch.vocab_size=500").vocabulary == 500
    words = {
        "model": {"vocab": {"a": 0, "b": 1, "</s>": 2}},
        "added_tokens": [{"id": 2, "content": "</s>"}, {"id": 3, "content": "<x>"}],
    }
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(words))
    assert sizes("actor", "models.actor.tokenizer=tokenizer").vocabulary == 4
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert "set vocab_size" in sizes("actor", "models.actor.tokenizer=tokenizer")


def test_a_warm_start_has_the_size_of_its_source():
    for role in ("actor", "critic", "ref"):
        assert sizes(role, recipe="ppo_math") == sizes()


def test_a_hub_model_is_sized_once_it_is_in_the_local_cache(tmp_path):
    why = sizes("actor", model_path("owner/name"))
    assert why.startswith("owner/name is not in the local Hub cache")
    repository = tmp_path / "hub" / "models--owner--name"
    write_config(repository / "snapshots" / "1234")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1234")
    assert cached_folder("owner/name") == repository / "snapshots" / "1234"
    assert sizes("actor", model_path("owner/name")).parameters() == PARAMETERS
    (repository / "snapshots" / "1234" / "config.json").unlink()
    assert cached_folder("owner/name") is None


HUGE = json.dumps({**CONFIG, "note": "y" * (1 << 20)})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("{", "holds no configuration"),
        ("[1]", "holds no configuration"),
        ("[" * 100_000, "holds no configuration"),
        ('{"model_type": "mamba"}', "mamba cannot be counted"),
        (HUGE, "holds no configuration"),
    ],
    ids=["broken", "a list", "deep", "unknown", "huge"],
)
def test_the_reason_for_an_unknown_size_is_reported(config, why, tmp_path):
    write_config(tmp_path / "model", config)
    assert why in sizes("actor", model_path("model"))


# -- lengths ---------------------------------------------------------------------------------------


def test_a_generated_dataset_declares_its_vocabulary():
    from rlcli import registry

    dataset = registry.load("datasets", "arithmetic")
    assert declared("datasets", "arithmetic", "VOCABULARY") == len(dataset.make_tokenizer())
    assert declared("datasets", "arithmetic", "no_such") is None


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic_demonstrations", "tool_demonstrations"])
def test_no_row_is_longer_than_declared(name):
    from rlcli import registry
    from rlcli.api.config import DatasetAbstraction
    from rlcli.api.data import DatasetUtility

    tokenizer = registry.load("datasets", "arithmetic").make_tokenizer()
    rows = registry.make_dataset(
        DatasetAbstraction(name, {"problems": 3000}), DatasetUtility(1, 0, 1, tokenizer)
    )
    longest = max(len(rows[index].data[rows.KEYS[0]]) for index in range(len(rows)))
    assert longest <= declared("datasets", name, "LONGEST") <= longest + 12


def test_lengths_of_prompts_and_sequences_follow_the_recipe(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "prompt": "x", "answer": "2"}\n')
    ppo = load_recipe("ppo_gsm8k", ["datasets.train.args.path=rows.jsonl"]).recipe
    assert vars(lengths_of(ppo)) == {"prompt": 512, "sequence": 1024, "assumed": False}
    sft = load_recipe("sft_gsm8k", ["datasets.train.args.path=rows.jsonl"]).recipe
    assert vars(lengths_of(sft)) == {"prompt": 0, "sequence": 1024, "assumed": False}
    assert longest_row(load_recipe("ppo_math").recipe.datasets["train"]) == 40


def test_an_undeclared_row_length_is_marked_as_assumed(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "silent.py").write_text(
        "from dataclasses import dataclass\nfrom rlcli.api.data import register_dataset\n\n\n"
        '@register_dataset("silent")\n@dataclass\nclass Silent:\n    """Says '
        'nothing."""\n\n    util: object\n'
    )
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    recipe = load_recipe("sft_math", ["datasets.train=silent"]).recipe
    assert lengths_of(recipe).assumed


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_models_that_shipped_recipes_name_are_known_offline(
    model, parameters, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    resolved = load_recipe("sft_gsm8k", [f"models.actor.path={model}"])
    assert architecture_of(resolved, "actor").parameters("lm") == parameters


def test_every_model_that_a_shipped_recipe_takes_from_the_hub_is_known():
    texts = [file.read_text() for file in (Path(__file__).parents[2] / "recipes").glob("*.yaml")]
    models = {
        model
        for text in texts
        for model in re.findall(r"^ +path: (\w+/\S+)$", text, flags=re.MULTILINE)
    }
    assert models == set(json.loads(KNOWN_CONFIGS.read_text()))
