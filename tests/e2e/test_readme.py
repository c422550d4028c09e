"""Every command of the README, and of the pages by task that it leads to, works as written there
(training commands on a toy model, for two steps)."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlcli.project import is_project

HOME = Path(__file__).parents[2]
TASKS = (
    "commands", "data", "recipes", "algorithms", "rewards", "components", "engines", "runs",
    "metrics", "evaluation",
)  # fmt: skip
PAGES = [HOME / "README.md", *(HOME / "docs" / f"{task}.md" for task in TASKS)]
DOCUMENTS = sorted({*PAGES, HOME / "ARCHITECTURE.md", *(HOME / "docs").rglob("*.md")})
TEXT = "\n".join(page.read_text() for page in PAGES)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def block_with(language, text):
    """The only block that contains it, on however many pages."""
    [block] = {block for block in blocks(language) if text in block}
    return block


def commands():
    """Each once, in the order of the pages."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [list(words) for words in dict.fromkeys(map(tuple, lines)) if words]


RLCLI = [words[1:] for words in commands() if words[0] == "rlcli"]
ABOUT_A_RUN = [words for words in RLCLI if "runs/ppo_math/<time>" in words]
TRAINING = [words for words in RLCLI if words[0] == "train" and "--dry-run" not in words]
COMPONENTS = [
    words for words in RLCLI if words[0] in ("new", "test") and words[-1].startswith("my-")
]
LOOKING = [
    words
    for words in RLCLI
    if words not in ABOUT_A_RUN and words not in TRAINING and words not in COMPONENTS
]
CONTRACTS = [words for words in LOOKING if words[:2] == ["test", "interface"]]


def test_the_readme_leads_to_every_page_by_task():
    readme = PAGES[0].read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    files = [link for link in links if "://" not in link]
    assert [link for link in files if not (page.parent / link).exists()] == []


def test_make_targets_of_the_readme_exist():
    makefile = (HOME / "Makefile").read_text()
    targets = [words[1] for words in commands() if words[0] == "make"]
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.fixture
def assert_works(warm_command, project_with_data):
    def run(words):
        done = warm_command(*words, cwd=project_with_data)
        assert done.returncode == 0, done.stderr
        assert (done.stdout + done.stderr).strip()

    return run


@pytest.mark.parametrize(
    "words", [words for words in LOOKING if words not in CONTRACTS], ids=" ".join
)
def test_commands_that_do_not_train_work(words, assert_works):
    assert_works(words)


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", CONTRACTS, ids=" ".join)
def test_commands_that_check_a_component_work(words, assert_works):
    assert_works(words)


@pytest.mark.exhaustive
def test_new_components_pass_their_tests(warm_command, tmp_path):
    """A project, and components in it that pass their tests."""
    project, *inside = sorted(COMPONENTS, key=lambda words: words[0] == "test")
    assert warm_command(*project, cwd=tmp_path).returncode == 0
    for words in inside:
        done = warm_command(*words, cwd=tmp_path / project[-1])
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    assert inside[-1][0] == "test"


def test_commands_about_a_run_work(warm_command, tmp_path, tiny_ppo):
    """In the order of the pages: resumed, converted, watched, prolonged, verified."""
    trained = warm_command("train", "ppo_math", *tiny_ppo, "--run-dir", "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    for words in ABOUT_A_RUN:
        replaced = [
            {"runs/ppo_math/<time>": "run", "train.steps=40": "train.steps=3"}.get(w, w)
            for w in words
        ]
        done = warm_command(*replaced, cwd=tmp_path)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        assert done.stdout  # a toy model may answer with blank lines
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 3
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


def test_the_example_layer_equals_the_output_of_cp(command, project_with_data):
    [words] = [words for words in LOOKING if words[0] == "cp"]
    done = command(*words, cwd=project_with_data)
    assert done.returncode == 0, done.stderr
    written = (project_with_data / words[2]).read_text()
    shown = block_with("yaml", f"# {words[2]}")
    assert _without_comments(written) == _without_comments(shown)


def _without_comments(layer):
    return [line for line in layer.splitlines() if not line.startswith("#")]


@pytest.fixture
def project_with_data(tmp_path):
    """A project and the data that the examples of the README use."""
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "gsm8k").mkdir()
    rows = "".join(
        json.dumps({"question": f"{i}+1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(8)
    )
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(rows)
    return tmp_path


@pytest.fixture
def model_and_data(tmp_path, project_with_data):
    """The same with the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlcli.registry import load

    tokenizer = load("datasets", "arithmetic").make_tokenizer()
    torch.manual_seed(0)
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **size)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "my-chat-model")
    tokenizer.save_pretrained(tmp_path / "my-chat-model")
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_training_commands_work(words, warm_command, model_and_data, tiny_ppo):
    words = [word.replace("/models/my-chat-model", "./my-chat-model") for word in words]
    overridden = {word.partition("=")[0] for word in words if "=" in word}
    has_dataset = "--data" in words
    small = [
        change
        for change in tiny_ppo
        if change.partition("=")[0] not in overridden
        and not (has_dataset and change.startswith(("models.", "datasets.", "train.steps")))
    ]
    done = warm_command(*words, *small, cwd=model_and_data)
    assert done.returncode == 0, done.stderr
    assert "model actor" in done.stdout.replace("\n", " ")


def test_the_example_layer_and_component_work(warm_command, model_and_data):
    layer, reward = block_with("yaml", "# my_ppo.yaml"), block_with("yaml", "brevity_inf")
    component = block_with("python", "class Brevity")
    assert is_project(model_and_data)
    for folder in ("interfaces", "recipes"):
        (model_and_data / folder).mkdir()
    (model_and_data / "interfaces" / "brevity.py").write_text(component)
    (model_and_data / "recipes" / "my_ppo.yaml").write_text(layer + reward)
    small = [
        "models.actor.path=my-chat-model",
        "train.steps=1",
        "train.eval.dataset=train",
        "train.prompts_per_step=4",
        "generation.max_new_tokens=4",
    ]
    done = warm_command("train", "my_ppo", *small, "--run-dir", "out", cwd=model_and_data)
    assert done.returncode == 0, done.stderr
    record = json.loads((model_and_data / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["reward/correct"] == 0
    assert record["reward/reward"] == pytest.approx(0.5 * record["reward/brevity"])
    assert record["reward/reward"] < 0
    assert record["eval/accuracy"] == 0


def test_the_python_example_works(model_and_data, capsys):
    example = block_with("python", "AutoModelForCausalLM")
    code = example.replace(
        "runs/ppo_math/<time>/models/actor", str(model_and_data / "my-chat-model")
    )
    exec(compile(code, "README.md", "exec"), {})
    assert "What is 14+4-5-5?" in capsys.readouterr().out
