"""The recipes of docs/environments.md that play other people's environments."""

from __future__ import annotations

import subprocess
import sys

import pytest
from chat_model import write_chat_model

from rlcli.registry import signature
from rlcli.registry.requirements import missing_libraries

pytestmark = pytest.mark.timeout(600)
LONGEST = 20
"""Lines of a recipe."""


def test_a_recipe_of_the_documentation_is_valid(documented_environment, documented, tmp_path):
    if any(missing_libraries(signature("environments", documented_environment))):
        pytest.skip("make test-environments installs its library")
    recipe = documented(documented_environment)
    assert len(recipe.splitlines()) <= LONGEST
    write_chat_model(tmp_path / "model", positions=1024)
    (tmp_path / "questions.jsonl").write_text('{"question": "6+7?", "answer": "13"}\n')
    (tmp_path / "mine.yaml").write_text(recipe)
    command = [sys.executable, "-m", "rlcli", "validate", "mine.yaml", "models.actor.path=model"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
