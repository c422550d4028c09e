"""Every command of the README works as it stands there (training ones on a toy model, for two steps)."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlcli.project import is_project

HOME = Path(__file__).parents[2]
README = (HOME / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in found if words]


RLCLI = [words[1:] for words in commands() if words[0] == "rlcli"]


def test_make_targets_exist():
    makefile = (HOME / "Makefile").read_text()
    targets = [words[1] for words in commands() if words[0] == "make"]
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("words", [w for w in RLCLI if w[0] != "train"], ids=" ".join)
def test_a_command_that_looks(words, command, tmp_path):
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.fixture
def model_and_data(tmp_path):
    """What the README's example of own weights and data takes for granted."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlcli.registry import load

    tokenizer = load("datasets", "arithmetic").make_tokenizer()
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **size)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "my-chat-model")
    tokenizer.save_pretrained(tmp_path / "my-chat-model")
    (tmp_path / "gsm8k").mkdir()
    rows = "".join(json.dumps({"question": f"{i}+1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(8))
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(rows)
    return tmp_path


@pytest.mark.parametrize("words", [w for w in RLCLI if w[0] == "train"], ids=" ".join)
def test_a_command_that_trains(words, command, model_and_data, tiny_ppo):
    words = [word.replace("/models/my-chat-model", "./my-chat-model") for word in words]
    given = {word.partition("=")[0] for word in words if "=" in word}
    own_data = "datasets.train" in given
    small = [
        change
        for change in tiny_ppo
        if change.partition("=")[0] not in given and not (own_data and change.startswith(("models.", "datasets.")))
    ]
    done = command(*words, *small, cwd=model_and_data)
    assert done.returncode == 0, done.stderr
    assert "model actor" in done.stdout.replace("\n", " ")


def test_the_layer_and_the_component(command, model_and_data):
    layer, reward = blocks("yaml")
    component = blocks("python")[1]
    (model_and_data / "pyproject.toml").write_text("[tool.rlcli]\n")
    assert is_project(model_and_data)
    for folder in ("interfaces", "recipes"):
        (model_and_data / folder).mkdir()
    (model_and_data / "interfaces" / "brevity.py").write_text(component)
    text = layer.replace("/models/my-chat-model", str(model_and_data / "my-chat-model"))
    (model_and_data / "recipes" / "my_ppo.yaml").write_text(text + reward)
    small = ["train.steps=1", "train.prompts_per_step=4", "generation.max_new_tokens=4"]
    done = command("train", "my_ppo", *small, "--run-dir", "out", cwd=model_and_data)
    assert done.returncode == 0, done.stderr
    record = json.loads((model_and_data / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert record["actor/reward"] < 0


def test_the_python_example(model_and_data, capsys):
    [example] = [block for block in blocks("python") if "AutoModelForCausalLM" in block]
    code = example.replace("runs/ppo_math/<time>/models/actor", str(model_and_data / "my-chat-model"))
    exec(compile(code, "README.md", "exec"), {})
    assert "What is 17+5-9?" in capsys.readouterr().out
