"""What a plain run does not use, it does not import."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from toy_project import TINY_PPO
from warm_command import ENVIRONMENT

ROOT = Path(__file__).parents[2]
PATTERNS = ("episodes.py", "_episode*.py", "_environment_*.py", "environments/*.py")
FILES = [file for pattern in PATTERNS for file in (ROOT / "interfaces").glob(pattern)]
OF_EPISODES = (
    "rlcli.api.environment",
    "rlcli.api.tool_formats",
    "rlcli.api.turns",
    *(".".join(("rlcli", *file.relative_to(ROOT).with_suffix("").parts)) for file in FILES),
)
UNUSED = (
    *OF_EPISODES,
    "rlcli.backends._context_parallel",
    "rlcli.backends._deepspeed_engine",
    "rlcli.backends._expert_parallel",
    "rlcli.backends._megatron_engine",
    "rlcli.backends._megatron_experts",
    "rlcli.backends._router_modules",
    "rlcli.backends._routers",
    "rlcli.backends._routing_replay",
    "rlcli.backends._server_engine",
    "rlcli.ops.block_attention",
    "rlcli.ops.context_attention",
    "rlcli.ops.flash_attention",
    "rlcli.ops.token_cut",
)
LIBRARIES = (
    *("deepspeed", "flash_attn", "mcp", "megatron", "openenv", "reasoning_gym", "verifiers"),
)


def imported_by(*arguments):
    """The modules that a command and all its processes import."""
    done = subprocess.run(
        [sys.executable, "-m", "rlcli", *arguments],
        env={**os.environ, **ENVIRONMENT, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.long
def test_a_plain_run_imports_nothing_of_other_layouts_mixtures_and_environments(tmp_path):
    run = ("--run-dir", str(tmp_path / "run"))
    modules = imported_by("train", "ppo_math", *TINY_PPO, *run)
    assert {"torch", "rlcli.backends._engine", "rlcli.backends._sharding"} <= modules
    assert [name for name in UNUSED if name in modules] == []
    assert [name for name in modules if name.partition(".")[0] in LIBRARIES] == []


@pytest.mark.parametrize("verb", ["validate", "plan"])
def test_a_recipe_without_environments_is_read_without_them(verb):
    modules = imported_by(verb, "grpo_math")
    assert "rlcli.recipe.resolve" in modules
    assert [name for name in OF_EPISODES if name in modules] == []


def test_the_modules_that_are_not_imported_exist():
    assert [name for name in UNUSED if find_spec(name) is None] == []
