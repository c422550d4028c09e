"""A small recipe that loads, and ways to write variants of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.resolve import load_recipe

SMALL = """\
models:
  actor:
    scratch: {model_type: llama}
    tokenizer: builtin:arithmetic
datasets:
  train: arithmetic_demonstrations
graph:
  sft_train:
    model: actor
    call: train_step
    interface: sft
    inputs: [packed_input_ids, prompt_mask]
train:
  steps: 3
  prompts_per_step: 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory that holds `small.yaml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def refusal(folder: Path) -> Callable[..., list[tuple[str, str | None]]]:
    """(code, where) of every problem of a recipe text."""

    def codes(text: str | bytes, *overrides: str) -> list[tuple[str, str | None]]:
        raw = text.encode() if isinstance(text, str) else text
        (folder / "bad.yaml").write_bytes(raw)
        with pytest.raises(RecipeError) as caught:
            load_recipe("bad.yaml", overrides)
        assert caught.value.exit_code == 2
        return [(problem.code, problem.where) for problem in caught.value.problems]

    return codes
