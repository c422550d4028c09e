"""`rlcli check` as a user sees it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlcli.cli.findings import finding_lines, summary
from rlcli.inspect.findings import Finding
from rlcli.recipe import resolve
from rlcli.registry import listing, load

SFT = """\
extends: base/sft
models:
  actor:
    scratch: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
    tokenizer: tok
datasets: {train: {type: prompt_answer, args: {path: rows.jsonl}}}
train: {steps: 1, prompts_per_step: 1}
"""


@pytest.fixture
def text_recipe(tmp_path, monkeypatch):
    """mine.yaml in the working directory: supervised fine-tuning on a file, with a tokenizer in a
    folder."""
    monkeypatch.chdir(tmp_path)
    load("datasets", "arithmetic").make_tokenizer().save_pretrained(tmp_path / "tok")
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "1+1?", "answer": "2"}\n{"prompt": "2+2?", "answer": "4"}\n'
    )
    (tmp_path / "mine.yaml").write_text(SFT)
    return tmp_path


@pytest.mark.parametrize("recipe", ["sft_math", "ppo_math"])
def test_shipped_recipes_pass_all_checks(rlcli, recipe):
    code, out, err = rlcli("check", recipe, "--rows", "20")
    assert (code, err) == (0, "")
    assert all(
        line.startswith(("ok", "skip", " ", "no problems found")) for line in out.splitlines()
    )
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "\x1b" not in out


def test_the_origin_of_a_warm_start_is_checked(rlcli):
    out = rlcli("check", "ppo_math", "--rows", "5")[1]
    assert "380 rows in the embedding" in out
    assert "runs after" in out


def test_check_as_json(rlcli, text_recipe):
    code, out, _ = rlcli("check", "mine.yaml", "--json")
    document = json.loads(out)
    assert (code, document["ok"], document["recipe"]) == (0, True, "mine")
    assert {"level", "about", "says", "details", "fix", "code", "exit_code", "figures"} == set(
        document["findings"][0]
    )
    (text_recipe / "rows.jsonl").write_text("{}\n")
    code, out, _ = rlcli("check", "mine.yaml", "--json")
    assert (code, json.loads(out)["ok"]) == (4, False)


def test_a_failure_is_reported_with_cause_fix_and_exit_code(rlcli, text_recipe):
    code, out, err = rlcli("check", "mine.yaml", "datasets.train.args.max_length=3")
    assert (code, err) == (4, "")
    lines = out.splitlines()
    (failure,) = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    assert "rows.jsonl:1" in "".join(lines[failure:])
    assert "fix: raise max_length" in " ".join(" ".join(lines[failure:]).split())
    assert lines[-1] == "1 failure"


def test_an_invalid_recipe_or_option_exits_2(rlcli, text_recipe):
    code, out, err = rlcli("check", "mine.yaml", "datasets.train.args.pth=x")
    assert (code, out) == (2, "")
    assert err.startswith("error[R42]")
    assert rlcli("check", "mine.yaml", "--rows", "0")[0] == 2


def test_control_characters_in_rows_are_escaped(rlcli, text_recipe):
    (text_recipe / "rows.jsonl").write_text(json.dumps({"prompt": "a", "\x1b[31manswer": 1}))
    code, out, _ = rlcli("check", "mine.yaml")
    assert code == 4
    assert "\x1b" not in out


def test_long_lines_are_wrapped_but_not_inside_numbers():
    finding = Finding(
        level="warn",
        about="x",
        says="word " * 20 + "12 345 678 rows",
        details=["d " * 60],
        fix="f " * 60,
    )
    lines = finding_lines(finding, 4, 60)
    assert all(len(line) <= 60 for line in lines)
    assert "12 345 678 rows" in " ".join(lines)
    assert lines[0].startswith("warn  x   word")


def test_the_summary_counts_failures_and_warnings():
    by_level = {
        level: Finding(level=level, about="", says="") for level in ("ok", "warn", "FAIL", "skip")
    }
    assert summary([by_level["ok"], by_level["skip"]]) == "no problems found"
    assert (
        summary([by_level["FAIL"], by_level["warn"], by_level["warn"]]) == "1 failure, 2 warnings"
    )


WITHOUT_HEAVY = [
    ["check", "sft_math"],
    ["check", "ppo_math"],
    ["check", "grpo_math"],
    ["check", "mine.yaml"],
    ["tokens", "sft_math"],
    ["tokens", "mine.yaml", "--row", "1"],
    ["doctor"],
]


def test_no_heavy_library_is_loaded(text_recipe, assert_light):
    assert_light(WITHOUT_HEAVY, text_recipe)


WITH_TORCH = ("-m", "rlcli")
_WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, Missing())
from rlcli.cli.main import main
main()
"""
WITHOUT_TORCH = ("-c", _WITHOUT_TORCH)


def in_a_process(program, *arguments):
    return subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.mark.parametrize("recipe", ["sft_math", "ppo_math", "grpo_math", "mine.yaml"])
def test_built_in_components_are_checked_completely_without_torch(text_recipe, recipe):
    done = in_a_process(WITHOUT_TORCH, "check", recipe, "--rows", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == in_a_process(WITH_TORCH, "check", recipe, "--rows", "20").stdout


NEEDS_TORCH = '''
from dataclasses import dataclass

import torch

from rlcli.api import model as model_api


@dataclass
class Brevity(model_api.ModelInterface):
    """A reward."""

    READS = {"inference": ("packed_input_ids",)}
    WRITES = {"inference": ("rewards",)}

    def inference(self, model, data, mb_spec):
        return torch.ones(data.bs)


model_api.register_interface("brevity", Brevity)
'''


def test_checks_that_need_torch_are_left_out_in_one_line_where_it_is_missing(text_recipe):
    (text_recipe / "pyproject.toml").write_text("[tool.rlcli]\n")
    (text_recipe / "interfaces").mkdir()
    (text_recipe / "interfaces" / "brevity.py").write_text(NEEDS_TORCH)
    reward = "graph.reward_inf.interface={_replace_: true, type: brevity}"
    done = in_a_process(WITHOUT_TORCH, "check", "ppo_math", reward, "--rows", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "torch is not installed" in line]
    assert "not checked without it: reward_inf reward, eval_reward reward, arguments" in line
    assert "fix: pip install torch" in done.stdout
    assert "ok    train lengths" in done.stdout


def test_training_without_torch_says_that_it_is_missing(text_recipe):
    done = in_a_process(WITHOUT_TORCH, "train", "mine.yaml", "--no-check")
    assert done.returncode == 6
    assert "torch is not installed, and rlcli train needs it" in done.stderr


def cpu_s(*arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "rlcli", *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.long
def test_checking_costs_at_most_three_times_the_processor_time_of_validating(text_recipe):
    """A ratio, so that it holds on a busy machine; importing torch alone costs more."""
    checking, validating = (
        min(cpu_s(verb, "sft_math") for _ in range(3)) for verb in ("check", "validate")
    )
    assert checking < 3 * validating


def test_contradictory_arguments_are_reported(rlcli, text_recipe):
    code, out, _ = rlcli("check", "ppo_math", "ppo.overlong_buffer=1000", "--rows", "2")
    assert code == 2
    assert "FAIL  arguments" in out
    assert "overlong_buffer is 1000; it must be at most" in " ".join(out.split())
    assert "command line" in out


def test_training_and_checking_refuse_the_same_model_files(rlcli, text_recipe):
    folder = text_recipe / "model"
    (text_recipe / "tok").rename(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 5}))
    save_file({"weight": np.zeros((5, 8), np.float32)}, folder / "model.safetensors")
    Path("mine.yaml").write_text(
        SFT.replace(
            "scratch: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, "
            "num_attention_heads: 1}\n    tokenizer: tok",
            "path: model",
        )
    )
    code, out, _ = rlcli("check", "mine.yaml")
    trained, _, err = rlcli("train", "mine.yaml")
    assert (code, trained) == (5, 5)
    assert "the tokenizer in model has 380 tokens" in " ".join(out.split())
    assert "the tokenizer in model has 380 tokens" in err


def test_each_recipe_of_a_chain_is_read_once_and_no_component_is_guessed(rlcli, monkeypatch):
    """Most of the time of a check was this."""
    read: list[str] = []
    resolve_layers = resolve.resolve_layers

    def counted(path: Path, *args):
        read.append(path.stem)
        return resolve_layers(path, *args)

    monkeypatch.setattr(resolve, "resolve_layers", counted)
    monkeypatch.setattr(listing, "called_elsewhere", pytest.fail)
    assert rlcli("check", "ppo_math", "--rows", "5")[0] == 0
    assert read == ["ppo_math", "sft_math"]
