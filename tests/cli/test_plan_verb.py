"""`rlcli plan` as a user sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_hub(tmp_path, monkeypatch):
    """An empty Hub cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def document(rlcli, *arguments: str) -> dict:
    code, out, err = rlcli("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ppo_math"],
        ["sft_math"],
        ["ppo_math", "--nodes", "2", "--devices", "8", "--device-memory", "0.2"],
        ["ppo_math", "--nodes", "16", "--devices", "4"],
        ["ppo_math", "--graph"],
        ["ppo_math", "models.actor.path=owner/a-model-with-a-long-name"],
    ],
)
def test_a_plan_is_plain_text_of_80_columns(rlcli, arguments):
    code, out, err = rlcli("plan", *arguments)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_a_plan_shows_layout_graph_batch_and_memory(rlcli):
    _, out, _ = rlcli("plan", "ppo_math", "--devices", "2", "--device-memory", "80")
    for words in (
        "ppo_math · 1 node x 2 devices (auto) · launch local",
        "runs after sft_math",
        "actor   ■■",
        "graph: actor_gen → reward_inf, ref_inf, critic_inf → advantages → actor_train,",
        "actor, critic: 256 sequences (128 per rank) in 4 updates of 64 (32 per rank)",
        "64 prompts x 4 responses = 256 sequences",
        "at most 40 + 64 = 104 tokens",
        "actor_train, critic_train: 1 micro-batch of ≤ 3328 tokens per update and rank",
        "peak of       held  grads  gathered  activ.",
        "within about 15 %",
        "disk: checkpoints of",
        " ok",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["models.actor.backend.args.share_prefixes=false"], "share_prefixes is false"),
        (
            ["models.actor.mesh.cp=2", "cluster.devices_per_node=2", "launch=local"],
            "cp divides each sequence among ranks",
        ),
        (
            ["models.actor.backend=megatron", "models.actor.rollout.backend=inference"],
            "megatron cannot share them",
        ),
    ],
    ids=["off", "cp", "megatron"],
)
def test_a_plan_says_which_calls_compute_a_prompt_for_each_sequence(rlcli, changes, reason):
    code, out, err = rlcli("plan", "grpo_math", *changes)
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    line = f"actor_train: common prefixes are computed for each sequence, as {reason}"
    assert line in words
    assert "prompt (computed once) and response" in words  # of the reference
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_a_plan_says_whether_common_prefixes_are_computed_once(rlcli):
    of_group, of_pair = (rlcli("plan", name)[1] for name in ("grpo_math", "dpo_arithmetic"))
    assert "= 104 tokens, prompt (computed once) and response" in of_group
    assert "80 tokens, common prefixes computed once" in of_pair
    assert not any("for each sequence" in out for out in (of_group, of_pair))
    assert "computed" not in rlcli("plan", "sft_math")[1]


def test_keys_of_calls_are_shown_only_with_graph(rlcli):
    _, short, _ = rlcli("plan", "ppo_math")
    _, long, _ = rlcli("plan", "ppo_math", "--graph")
    assert "reads  packed_prompts" in long
    assert "actor_gen     actor.generate" in long
    assert "packed_prompts" not in short
    assert len(short.splitlines()) < len(long.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ["ppo_math", "--device-memory", "80"],
        ["ppo_gsm8k", "--with", "gpu8", "--device-memory", "80"],
        ["grpo_math", "--nodes", "4", "--devices", "8"],
        ["sft_math"],
    ],
    ids=" ".join,
)
def test_a_plan_fits_a_screen_and_names_what_it_leaves_out(rlcli, arguments):
    _, out, _ = rlcli("plan", *arguments)
    assert len(out.splitlines()) <= 40
    assert out.splitlines()[-1] == "in detail: --graph --timeline --memory --layouts"
    _, out, _ = rlcli("plan", *arguments, "--memory", "--timeline")
    assert "held " in out
    assert "timeline: one column per turn" in out
    assert out.splitlines()[-1] == "in detail: --graph --layouts"


@pytest.mark.parametrize(
    ("arguments", "shortfall"),
    [
        (["--device-memory", "80"], None),
        (["--device-memory", "0.2"], "actor_train needs more memory than a device has"),
        (
            ["--device-memory", "80", "models.actor.path=owner/name"],
            "the memory of actor is unknown",
        ),
    ],
)
def test_a_strict_plan_exits_6_unless_it_fits(rlcli, arguments, shortfall):
    assert rlcli("plan", "ppo_math", *arguments)[0] == 0
    code, out, err = rlcli("plan", "ppo_math", *arguments, "--strict")
    assert "memory of" in out
    assert code == (6 if shortfall else 0)
    assert (shortfall or "") in err
    code, out, _ = rlcli("plan", "ppo_math", *arguments, "--strict", "--json")
    assert (code, bool(json.loads(out)["shortfalls"])) == ((6, True) if shortfall else (0, False))


def test_a_strict_plan_exits_6_without_enough_disk_space(rlcli, monkeypatch):
    monkeypatch.setattr("rlcli.topology.storage._free", lambda folder: 1)
    code, _, err = rlcli("plan", "ppo_math", "--device-memory", "80", "--strict")
    assert code == 6
    assert "does not fit: the disk of runs has too little space" in err


def test_a_strict_plan_requires_the_memory_of_a_device(rlcli):
    code, _, err = rlcli("plan", "ppo_math", "--strict")
    assert code == 2
    assert "--device-memory 80" in err


def test_the_json_contains_the_entire_plan(rlcli):
    plan = document(rlcli, "ppo_math", "--device-memory", "80")
    assert [(role["role"], role["ranks"]) for role in plan["roles"]] == [
        ("actor", [0]),
        ("critic", [0]),
        ("ref", [0]),
        ("reward", [0]),
    ]
    assert plan["stages"][0] == ["actor_gen"]
    assert {role["role"]: role["parameters"] for role in plan["memory"]["held"]}["actor"] == 852608
    assert {peak["verdict"] for peak in plan["memory"]["peaks"]} == {"ok"}
    assert all(peak["total"] >= peak["held"] > 0 for peak in plan["memory"]["peaks"])
    assert plan["memory"]["within_percent"] == 15
    assert plan["storage"]["checkpoint"] == 12 * (852608 + 852737)
    assert plan["storage"]["free"] > 0


def test_too_little_memory_is_reported_with_a_key_that_helps(rlcli):
    plan = document(rlcli, "ppo_math", "cluster.device=cpu", "--device-memory", "0.2")
    assert {peak["call"]: peak["verdict"] for peak in plan["memory"]["peaks"]}[
        "actor_train"
    ] == "too much"
    (key, *_) = plan["memory"]["advice"]["actor_train"]
    _, out, _ = rlcli("plan", "ppo_math", "cluster.device=cpu", "--device-memory", "0.2")
    assert f"would fit with {key}" in " ".join(out.split())


def test_the_memory_of_a_missing_model_is_unknown_with_the_reason(rlcli):
    _, out, _ = rlcli("plan", "ppo_math", "models.actor.path=owner/name")
    assert (
        "memory of actor, critic, ref is unknown: owner/name is not in the local Hub cache"
        in " ".join(out.split())
    )
    assert "the size of a checkpoint is unknown" in out
    assert (
        document(rlcli, "ppo_math", "models.actor.path=owner/name")["storage"]["checkpoint"] is None
    )


REF = "models.ref.backend="
BACKEND = """
import not_installed
from dataclasses import dataclass
from typing import ClassVar
from rlcli.api.model import ModelBackend, register_backend

@register_backend("{name}")
@dataclass(frozen=True, kw_only=True)
class Mine(ModelBackend):
    TRAINS: ClassVar[bool] = False
    {memory}
    per_token: int = 5
"""
MEMORY = """
from rlcli.api.memory import Kept, MemoryModel, Parts, UnknownMemory

class MyMemory(MemoryModel):
    WITHIN_PERCENT = 40

    def __init__(self, role):
        super().__init__(role)
        if role.mesh["dp"] > 1:
            raise UnknownMemory("nobody has measured several ranks")

    def resident(self):
        return Kept(weights=2 * self.role.architecture.parameters())

    def load(self):
        return Parts()

    def inference(self, tokens):
        return Parts(activations=self.role.arguments["per_token"] * tokens)
"""


@pytest.fixture
def backends(rlcli, tmp_path, monkeypatch):
    """Three backends of the user that cannot be imported here: with a memory model, without one,
    and with the name of a missing one."""
    project = tmp_path / "mine"
    (project / "backends").mkdir(parents=True)
    (project / "pyproject.toml").write_text("[tool.rlcli]\n")
    (project / "backends" / "_my_memory.py").write_text(MEMORY)
    offers = {"with_memory": "_my_memory.MyMemory", "with_a_typo": "_my_memory.Mine"}
    for name, model in {**offers, "without": None}.items():
        text = BACKEND.format(
            name=name, memory=f'MEMORY: ClassVar[str] = "{model}"' if model else ""
        )
        (project / "backends" / f"{name}.py").write_text(text)
    monkeypatch.setenv("RLCLI_PROJECT", str(project))
    monkeypatch.delitem(sys.modules, "rlcli.backends._my_memory", raising=False)


def test_a_backend_of_the_user_may_have_a_memory_model(rlcli, backends):
    backend = f"{REF}{{_replace_: true, type: with_memory, args: {{per_token: 7}}}}"
    memory = document(rlcli, "ppo_math", backend)["memory"]
    assert (memory["unknown"], memory["within_percent"]) == ({}, 40)
    assert {role["role"]: role["total"] for role in memory["held"]}["ref"] == 2 * 852608
    (peak,) = [peak for peak in memory["peaks"] if peak["call"] == "ref_inf"]
    # of whole sequences: groups of four may be cut
    assert peak["activations"] == 7 * (16384 // 104 * 104)
    on_two_ranks = document(rlcli, "ppo_math", backend, "--devices", "2")
    assert on_two_ranks["memory"]["unknown"] == {"ref": "nobody has measured several ranks"}


def test_a_backend_without_a_memory_model_is_named(rlcli, backends):
    _, out, _ = rlcli("plan", "ppo_math", f"{REF}{{_replace_: true, type: without}}")
    assert "memory of ref is unknown: the backend without does not estimate it" in " ".join(
        out.split()
    )
    assert "ref      0       853 K" in out
    code, _, err = rlcli("plan", "ppo_math", f"{REF}{{_replace_: true, type: with_a_typo}}")
    assert code == 2
    assert "MEMORY of Mine is '_my_memory.Mine'; there is no such attribute" in err
    assert "with_a_typo.py:9" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "-1"], "--device-memory is -1"),
        (["--device-memory", "nan"], "--device-memory is nan"),
        (["--nodes", "0"], "--nodes"),
        (["--devices", "3", "models.actor.mesh={tp: 1, dp: 1}"], "the mesh of actor"),
    ],
)  # fmt: skip
def test_mistakes_exit_2_with_one_message(rlcli, arguments, message):
    code, out, err = rlcli("plan", "ppo_math", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [[], ["--json", "--device-memory", "1"]])
def test_a_plan_loads_no_heavy_library(arguments):
    script = f"""
import sys
from rlcli.cli.main import main
try:
    main(["plan", "ppo_math", *{arguments!r}])
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = ("torch", "transformers", "datasets", "sympy", "huggingface_hub", "numpy", "rich.table")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_a_plan_for_16384_devices_is_as_short_as_for_a_few(rlcli):
    few, many = (
        rlcli(
            "plan",
            "ppo_math",
            "--nodes",
            nodes,
            "--devices",
            "8",
            f"train.prompts_per_step={8 * int(nodes)}",
        )[1]
        for nodes in ("2", "2048")
    )
    assert "2048 nodes x 8 devices" in many
    assert "ranks 0-16383" in many
    assert len(many.splitlines()) <= len(few.splitlines()) + 2
    assert max(map(len, many.splitlines())) <= 100
