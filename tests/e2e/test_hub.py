"""A first command for the owner of a GPU: the recipes over GSM8K take it from the Hub,
as they are."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pyarrow
import pytest
from chat_model import write_chat_model
from hub_server import hub_with
from pyarrow import parquet

from rlcli.datasets._sources import RowSource
from rlcli.recipe.resolve import load_recipe

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
"""
SMALL = (
    "models.reward.backend=null", "train.steps=1", "train.prompts_per_step=2",
    "generation.responses_per_prompt=2", "generation.max_new_tokens=4", "grpo.minibatches=1",
    "cluster.device=cpu", "checkpoint.save=false",
)  # fmt: skip


def rows(count: int) -> bytes:
    """A table of questions, as the Hub stores them."""
    questions = {
        "question": [f"{i}+1?" for i in range(count)],
        "answer": [f"#### {i + 1}" for i in range(count)],
    }
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(questions), file)
    return file.getvalue()


@pytest.fixture
def train(tmp_path):
    """Run the recipe with a small model, given the address of a Hub."""
    model = write_chat_model(tmp_path / "model", positions=1024)

    def run(endpoint, *overrides):
        command = [
            sys.executable,
            "-m",
            "rlcli",
            "train",
            "grpo_gsm8k",
            f"models.actor.path={model}",
            *SMALL,
            *overrides,
        ]
        variables = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
        }
        return subprocess.run(
            [*command, "--run-dir", str(tmp_path / "run")],
            env=os.environ | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return run


@pytest.mark.long
def test_gsm8k_comes_from_the_hub(train, tmp_path):
    files = {
        "README.md": CARD,
        "main/train-0.parquet": rows(20),
        "socratic/train-0.parquet": rows(3),
    }
    with hub_with("openai/gsm8k", files) as endpoint:
        finished = train(endpoint)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.exhaustive
def test_without_a_hub_the_error_says_how_to_use_a_copy(train, tmp_path):
    refused = train("http://127.0.0.1:1")
    assert refused.returncode == 4, refused.stderr
    assert "--data FILE.jsonl" in " ".join(refused.stderr.split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("config=null", "choose one of main, socratic: datasets.train.args.config=main"),
        ("config=mian", "choose one of main, socratic: datasets.train.args.config=main"),
        ("split=dev", "choose one of train: datasets.train.args.split=train"),
    ],
)
def test_a_part_of_a_dataset_that_is_not_there_is_reported_with_those_that_are(
    train, setting, hint
):
    files = {
        "README.md": CARD,
        "main/train-0.parquet": rows(2),
        "socratic/train-0.parquet": rows(2),
    }
    with hub_with("openai/gsm8k", files) as endpoint:
        refused = train(endpoint, f"datasets.train.args.{setting}")
    assert refused.returncode == 4, refused.stderr
    assert hint in " ".join(refused.stderr.split())


def test_a_copy_needs_no_other_setting(tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    settings = (
        load_recipe("grpo_gsm8k", [f"datasets.train.args.path={copy}"])
        .recipe.datasets["train"]
        .args
    )
    assert len(list(RowSource(str(copy), config=settings["config"]).rows())) == 1
