"""Completion: the candidates for a line, and that the scripts of the shells pass them on
unchanged."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rlcli.cli.candidates import candidates
from rlcli.cli.completion import SCRIPTS, Shell, split_line
from rlcli.cli.main import VERBS, app
from rlcli.errors import RecipeError
from rlcli.recipe.introspection.completions import (
    key_candidates,
    override_candidates,
    sketch,
    values,
)
from rlcli.recipe.resolve import load_recipe

REPOSITORY = Path(__file__).parents[2]

MINE = """\
extends: ppo_math
models: {judge: {init: actor}}
datasets: {exam: prompt_answer}
train: {steps: 7}
"""
ROLES = ("actor", "critic", "ref", "reward", "judge", "null")


@pytest.fixture(scope="module")
def command():
    return typer.main.get_command(app)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe, a run and other files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "broken.yaml").write_text("extends: [ppo_math\n")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "score.py").write_text("")
    run = tmp_path / "runs/ppo_math/one"
    run.mkdir(parents=True)
    (run / "status.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "actor/reward": 0.5}\n')
    (run / "recipe.resolved.yaml").write_text(MINE)
    return tmp_path


@pytest.fixture
def complete(command, folder):
    """The candidates for the last word of a line."""
    return lambda line: [candidate.text for candidate in candidates(command, line.split(" "))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trai", ["train"]),
        ("--ver", ["--version"]),
        ("train ppo_m", ["ppo_math"]),
        ("train mi", ["mine.yaml"]),
        ("train ./mi", ["./mine.yaml"]),
        ("train not", []),
        ("--project . train mi", ["mine.yaml"]),
        ("train ppo_math --run", ["--run-dir"]),
        ("train ppo_math mod", ["models."]),
        ("train mine.yaml models.j", ["models.judge."]),
        ("train ppo_math models.j", []),
        ("train ppo_math models.critic.he", ["models.critic.head="]),
        ("train ppo_math models.critic.head=",
         ["models.critic.head=value", "models.critic.head=lm"]),
        ("train mine.yaml models.judge.init=", [f"models.judge.init={r}" for r in ROLES]),
        ("train ppo_math models.actor.backend=f", ["models.actor.backend=fsdp"]),
        ("train ppo_math models.actor.backend.type=inf", ["models.actor.backend.type=inference"]),
        ("train ppo_math models.actor.backend.args.beta1", ["models.actor.backend.args.beta1="]),
        ("train ppo_math models.ref.backend.args.beta", []),
        ("train ppo_math models.ref.backend=fsdp models.ref.backend.args.beta1",
         ["models.ref.backend.args.beta1="]),
        ("train ppo_math launch=", ["launch=inline", "launch=local", "launch=slurm"]),
        ("train ppo_math cluster.device=c", ["cluster.device=cpu", "cluster.device=cuda"]),
        ("train ppo_math train.shuffle=", ["train.shuffle=true", "train.shuffle=false"]),
        ("train mine.yaml train.dataset=",
         ["train.dataset=train", "train.dataset=held_out", "train.dataset=exam"]),
        ("train mine.yaml train.steps=", ["train.steps=7", "train.steps=null"]),
        ("train ppo_math train.steps=3 train.step", []),
        ("train ppo_math ppo.kl_c", ["ppo.kl_ctl="]),
        ("train ppo_math ppo.generation.gree", ["ppo.generation.greedy="]),
        ("train ppo_math graph.advantages.interface.args.kl_c",
         ["graph.advantages.interface.args.kl_ctl="]),
        ("train ppo_math graph.actor_train.mod", ["graph.actor_train.model="]),
        ("train ppo_math graph.actor_train.model=c", ["graph.actor_train.model=critic"]),
        ("train ppo_math models.critic=", ["models.critic=null"]),
        ("train ppo_math models.critic=null graph.actor_train.model=c", []),
        ("train ppo_math graph.critic_inf=null graph.crit", ["graph.critic_train."]),
        ("train ppo_math graph.reward_inf.interface=math",
         ["graph.reward_inf.interface=math_reward"]),
        ("train ppo_math train.eval.graph.eval_gen.mod", ["train.eval.graph.eval_gen.model="]),
        ("train ppo_math datasets.train=prompt_",
         ["datasets.train=prompt_answer", "datasets.train=prompt_only"]),
        ("train mine.yaml datasets.exam.args.prompt_k", ["datasets.exam.args.prompt_key="]),
        ("train ppo_math models.actor.tokenizer=mi", ["models.actor.tokenizer=mine.yaml"]),
        ("train ppo_math nothing.at.all", []),
        ("train no_such_recipe mod", ["models."]),
        ("train broken.yaml see", ["seed="]),
        ("train ppo_math --with min", ["mine.yaml"]),
        ("train ppo_math --with=min", ["--with=mine.yaml"]),
        ("train ppo_math --with mine.yaml models.j", ["models.judge."]),
        ("explain ppo_math ppo.kl_c", ["ppo.kl_ctl"]),
        ("explain ppo_math trai", ["train."]),
        ("explain ppo_math ppo.kl_ctl ppo.kl_c", ["ppo.kl_ctl="]),
        ("show ppo_a", ["ppo_actor"]),
        ("show back", ["backend"]),
        ("show backend f", ["fsdp"]),
        ("show backend fsdp f", []),
        ("show ppo_math see", ["seed="]),
        ("show mo", ["models"]),
        ("show launch.sl", ["launch.slurm"]),
        ("show met", ["metrics"]),
        ("train ppo_math --sweep ppo.kl_c", ["ppo.kl_ctl="]),
        ("train ppo_math --sweep=ppo.kl_c", ["--sweep=ppo.kl_ctl="]),
        ("train ppo_math --sweep generation.greedy=t", ["generation.greedy=true"]),
        ("migrate no", []),
        ("migrate mi", ["mine.yaml"]),
        ("ls da", ["datasets"]),
        ("completion f", ["fish"]),
        ("resume runs/p", ["runs/ppo_math/one", "runs/ppo_math/"]),
        ("logs ppo_math/o", ["ppo_math/one"]),
        ("stop --runs runs/ppo_math o", ["one"]),
        ("plot ppo_math/o", ["ppo_math/one"]),
        ("plot ppo_math/one actor/r", ["actor/reward"]),
        ("compare ppo_math/one actor/r", ["actor/reward"]),
        ("watch ppo_math/one ppo_math/o", ["ppo_math/one"]),
        ("report ppo_math/o", ["ppo_math/one"]),
        ("chat ppo_math/o", ["ppo_math/one"]),
        ("eval ppo_math/o", ["ppo_math/one"]),
        ("generate ppo_math/o", ["ppo_math/one"]),
        ("convert ppo_math/o", ["ppo_math/one"]),
        ("eval ppo_math/one --dataset no", ["notes.txt"]),
        ("eval ppo_math/one --dataset arithmetic_d", ["arithmetic_demonstrations"]),
        ("eval ppo_math/one --dataset ppo_m", ["ppo_math"]),
        ("train grpo --reward ./sc", ["./score.py"]),
        ("resume runs/ppo_math/one models.j", ["models.judge."]),
        ("diff ppo_math mi", ["mine.yaml"]),
        ("tokens mine.yaml --dataset e", ["exam"]),
        ("test fam", ["family"]),
        ("test family qwen3", ["qwen3", "qwen3_moe"]),
        ("test reward m", ["math_reward"]),
        ("test recipe sft_m", ["sft_math", "sft_math_moe"]),
        ("test recipe mine.yaml models.j", ["models.judge."]),
        ("test interface sft see", []),
        ("test nothing s", []),
        ("schema train.e", ["train.eval"]),
        ("nothing x", []),
        ("train ppo_math \x1b", []),
        ("", [verb for verbs in VERBS.values() for verb in verbs]),
    ],
)  # fmt: skip
def test_candidates_for_a_line(complete, line, expected):
    assert complete(line) == expected


def test_components_of_the_project_are_completed(complete, folder):
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    (folder / "interfaces").mkdir()
    (folder / "interfaces/my_own.py").write_text("")
    assert complete("show my_") == ["my_own"]
    assert complete("train ppo_math graph.reward_inf.interface=my_") == [
        "graph.reward_inf.interface=my_own"
    ]


def test_every_offered_key_can_be_set(folder):
    """Walk all keys of a recipe: those that end with a dot have keys below,
    those that end with = are valid."""
    tree = sketch("ppo_math")
    waiting, leaves = [""], []
    while waiting:
        for candidate in override_candidates(tree, waiting.pop()):
            (waiting if candidate.text.endswith(".") else leaves).append(candidate.text)
    assert len(leaves) > 200
    assert len(leaves) == len(set(leaves))
    settable = [
        key for key in leaves if f"{key[:-1]}.type=" not in leaves
    ]  # `launch=` would set launch.type a second time
    overrides = [
        f"{key}{candidates_of_key[0][0]}"
        for key in settable
        if (candidates_of_key := values(tree, key[:-1]))
    ]
    assert len(overrides) > 100
    with pytest.raises(RecipeError) as raised:  # all at once are contradictory, but none is unknown
        load_recipe("ppo_math", overrides)
    assert not [
        problem
        for problem in raised.value.problems
        if "unknown key" in problem.what or problem.code == "R05"
    ]


def test_candidates_have_descriptions(folder):
    (seed,) = key_candidates(sketch("ppo_math"), "seed")
    assert seed.doc
    (lr,) = key_candidates(sketch("ppo_math"), "models.actor.backend.args.lr")
    assert lr.doc


@pytest.mark.parametrize(
    ("line", "words", "quote"),
    [
        ("rlcli train ", ["rlcli", "train", ""], ""),
        ("rlcli train pp", ["rlcli", "train", "pp"], ""),
        ("rlcli train 'a b", ["rlcli", "train", "a b"], "'"),
        ('rlcli "a b" c', ["rlcli", "a b", "c"], ""),
        (r"rlcli a\ b", ["rlcli", "a b"], ""),
        ("rlcli '' x", ["rlcli", "", "x"], ""),
        ("", [""], ""),
    ],
)
def test_an_incomplete_line_is_split_into_words(line, words, quote):
    assert split_line(line) == (words, quote)


# -- the verb --------------------------------------------------------------------------------------


def test_the_completion_script_is_printed_or_installed(rlcli, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for shell, file in (
        ("bash", "data/bash-completion/completions/rlcli"),
        ("zsh", "data/zsh/site-functions/_rlcli"),
        ("fish", "config/fish/completions/rlcli.fish"),
    ):
        code, script, err = rlcli("completion", shell)
        assert (code, script, err) == (0, SCRIPTS[Shell(shell)], "")
        code, out, err = rlcli("completion", shell, "--install")
        assert (code, out) == (0, "")
        assert str(tmp_path / file) in err
        assert (tmp_path / file).read_text() == script
        assert json.loads(rlcli("completion", shell, "--json")[1])["file"] == str(tmp_path / file)


def test_the_shell_is_detected_from_the_environment(rlcli, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert rlcli("completion")[1] == SCRIPTS[Shell.FISH]
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert rlcli("completion")[0] == 2
    monkeypatch.delenv("SHELL")
    assert rlcli("completion")[0] == 2


def test_an_unwritable_folder_is_reported(rlcli, tmp_path, monkeypatch):
    (tmp_path / "data").write_text("a file")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    code, out, err = rlcli("completion", "bash", "--install")
    assert (code, out) == (6, "")
    assert err.startswith("error[F75]")


def test_completion_never_prints_errors(rlcli):
    for arguments in (
        [],
        ["zsh"],
        ["bash"],
        ["bash", "'"],
        ["zsh", "train", "\udcff"],
        ["fish", "train", "ppo_math", "a=b=c.d="],
    ):
        code, _, err = rlcli("__complete", *arguments)
        assert (code, err) == (0, "")


# -- real shells -----------------------------------------------------------------------------------


@pytest.fixture
def shell(folder, monkeypatch):
    """Runs a script in a shell with `rlcli` on its PATH; returns the lines that it prints."""
    tool = folder / "bin/rlcli"
    tool.parent.mkdir()
    path, python = shlex.quote(str(REPOSITORY)), shlex.quote(sys.executable)
    tool.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {python} -m rlcli "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/local/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(folder))

    def run(*command: str) -> list[str]:
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlcli trai", ["train"]),
        ("rlcli train ppo_math mod", ["models."]),
        ("rlcli train ppo_math launch=l", ["local"]),  # readline replaces what follows the =
        ("rlcli train ppo_math launch=", ["inline", "local", "slurm"]),
        # and what follows the :
        ("rlcli train ppo_math models.actor.path=recipe:sft_gs", ["sft_gsm8k#actor"]),
        ("rlcli train ppo_math 'launch=l", ["launch=local"]),  # but not inside quotes
        ("rlcli train ppo_math --with=min", ["mine.yaml"]),
    ],
)
def test_completion_in_bash(shell, line, expected):
    script = """
        source <(rlcli completion bash)
        COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
        _rlcli rlcli
        printf '%s\\n' "${COMPREPLY[@]}"
        complete -p rlcli >/dev/null
    """
    completed = shell("bash", "--norc", "-c", script, "bash", line)
    assert [word.replace("\\#", "#") for word in completed] == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rlcli", "trai"], ["train"]),
        (["rlcli", "train", "ppo_math", "launch=l"], ["launch=local"]),
        (
            ["rlcli", "train", "ppo_math", "models.actor.path=recipe:sft_gs"],
            ["models.actor.path=recipe:sft_gsm8k#actor"],
        ),
    ],
)
def test_completion_in_zsh(shell, words, expected):
    script = """
        compdef() { }
        source <(rlcli completion zsh)
        compadd() { print -rl -- "${(@P)argv[-1]}" }
        words=("$@") CURRENT=$# PREFIX=${@[-1]}
        _rlcli
    """
    assert shell("zsh", "-f", "-c", script, "zsh", *words) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlcli trai", ["train"]),
        ("rlcli train ppo_math launch=l", ["launch=local"]),
        (
            "rlcli train ppo_math models.actor.path=recipe:sft_gs",
            ["models.actor.path=recipe:sft_gsm8k#actor"],
        ),
    ],
)
def test_completion_in_fish(shell, line, expected):
    completed = shell(
        "fish", "--no-config", "-c", f"rlcli completion fish | source; complete -C '{line}'"
    )
    assert [word.partition("\t")[0] for word in completed] == expected
