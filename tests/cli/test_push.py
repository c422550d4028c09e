"""`rlcli push`: a model on a Hub of this machine, and its card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_uploads import TOKEN, uploading_hub
from recorded_runs import record_run

from rlcli.errors import ModelError
from rlcli.launch.hub_upload import files_to_push
from rlcli.launch.trained_model import TrainedModel
from rlcli.observe.page.contents import contents

MODEL = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)),
    "tokenizer.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}


def trained_run(folder: Path) -> Path:
    """A finished run with a model; its contents do not matter to the Hub."""
    run = record_run(
        folder, metrics=lambda step: {"actor/reward": step / 10, "eval/accuracy": step / 4}
    )
    for name, content in MODEL.items():
        file = run / "models/actor" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (run / "curve.png").write_bytes(b"a picture")
    return run


@pytest.fixture
def push(tmp_path):
    """Push a run from a process of its own, as the Hub's address is read when its library is
    imported."""

    def push(run, *options, endpoint, token=TOKEN):
        variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        variables |= {"HF_HUB_DISABLE_XET": "1"}  # a protocol of its own, which the Hub here lacks
        variables |= {"HF_TOKEN": token} if token else {}
        command = [sys.executable, "-m", "rlcli", "push", str(run), "--to", "me/sums", *options]
        environment = {name: text for name, text in os.environ.items() if name != "HF_TOKEN"}
        return subprocess.run(
            command,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return push


def test_a_model_its_card_and_its_recipe_are_one_commit(push, tmp_path):
    run = trained_run(tmp_path / "run")
    with uploading_hub() as hub:
        done = push(run, "--private", endpoint=hub.endpoint)
        assert (done.returncode, done.stdout) == (0, f"{hub.endpoint}/me/sums\n"), done.stderr
        assert hub.repositories == {"me/sums": True}
        assert len(hub.messages) == 1
    of_the_run = {"curve.png": b"a picture"}
    of_the_run["recipe.resolved.yaml"] = (run / "recipe.resolved.yaml").read_bytes()
    card = hub.files.pop("README.md").decode()
    assert hub.files == MODEL | of_the_run
    assert "| held-out accuracy | 0.250 | 1.00 |" in card
    assert "rlcli train ppo_math ppo.kl_ctl=0.1" in card
    assert "/home/me" not in card


def test_a_model_is_pushed_again_into_its_repository(push, tmp_path):
    run = trained_run(tmp_path / "run")
    with uploading_hub() as hub:
        for _ in range(2):
            assert push(run, endpoint=hub.endpoint).returncode == 0
        assert (list(hub.repositories), len(hub.messages)) == (["me/sums"], 2)


def test_weights_and_templates_of_an_earlier_model_are_removed(push, tmp_path):
    """transformers would read model.safetensors, not the new files; what it does not read stays."""
    run = trained_run(tmp_path / "run")
    with uploading_hub() as hub:
        assert push(run, endpoint=hub.endpoint).returncode == 0
        hub.files["notes.json"] = b"{}"
        model = run / "models/actor"
        (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
        (model / "model.safetensors.index.json").write_text("{}")
        (model / "additional_chat_templates/tool_use.jinja").unlink()
        assert push(run, endpoint=hub.endpoint).returncode == 0
    new = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    of_the_run = {"README.md", "curve.png", "recipe.resolved.yaml"}
    assert hub.files.keys() == new | of_the_run | {"config.json", "tokenizer.json", "notes.json"}


@pytest.mark.parametrize("name", ["models/actor/.env", "curve.png"])
def test_a_file_behind_a_link_is_not_uploaded(tmp_path, name):
    run = trained_run(tmp_path / "run")
    (tmp_path / "private").write_text("canary")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "private")
    trained = TrainedModel(str(run / "models/actor"), "run", run, "actor")
    with pytest.raises(ModelError, match="is a link out of its folder"):
        files_to_push(trained, "me/sums")


@pytest.mark.parametrize(
    ("status", "token", "hint"),
    [
        (401, TOKEN, "hf auth login"),
        (403, TOKEN, "a token that may write"),
        (None, "hf_old", "login"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(push, tmp_path, status, token, hint):
    run = trained_run(tmp_path / "run")
    with uploading_hub(status) as hub:
        done = push(run, endpoint=hub.endpoint, token=token)
    assert done.returncode == 6
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert token not in done.stderr


def test_without_a_connection_nothing_is_lost(push, tmp_path):
    done = push(trained_run(tmp_path / "run"), endpoint="http://127.0.0.1:9")
    assert done.returncode == 6
    assert "HF_ENDPOINT" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_card_is_shown_without_pushing_it(rlcli, tmp_path):
    trained_run(tmp_path / "run")
    code, out, err = rlcli("push", "run", "--to", "me/sums", "--dry-run")
    assert code == 0
    assert "7 files would be uploaded" in err
    head = yaml.safe_load(out.split("---")[1])
    assert (head["library_name"], head["tags"][0]) == ("transformers", "rlcli")


def test_a_card_says_with_what_a_run_was_continued(rlcli, tmp_path):
    run = trained_run(tmp_path / "run")
    changes = [{"key": "train.steps", "before": 2, "now": 4}]
    entries = [{"step": 1, "changes": []}, {"step": 2, "changes": changes}, {"step": "?"}]
    (run / "resumes.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    _, out, _ = rlcli("push", "run", "--to", "me/sums", "--dry-run")
    continued = [line for line in out.splitlines() if line.startswith("It was continued")]
    assert continued == ["It was continued after step 2 with `train.steps=4`."]


def test_a_card_of_a_checkpoint_describes_its_step(tmp_path):
    run = trained_run(tmp_path / "run")
    entries = [
        {"step": step, "changes": [{"key": "seed", "before": 1, "now": step}]} for step in (1, 3)
    ]
    (run / "resumes.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    trained = TrainedModel(str(run / "models/actor"), "run, actor of step 3", run, "actor", 3)
    card = files_to_push(trained, "me/sums")["README.md"].decode()
    assert "after 3 steps" in card
    assert "| held-out accuracy | 0.250 | 0.750 |" in card
    assert ("`seed=1`" in card, "`seed=3`" in card) == (True, False)


JUDGE = {"url": "http://me:hunter22@judge/", "api_key": "hunter22", "max_new_tokens": 64}


def judged_run(folder: Path) -> Path:
    """A run whose recipe and command contain secrets."""
    run = trained_run(folder)
    call = {"model": "reward", "call": "inference", "interface": {"type": "mine", "args": JUDGE}}
    recipe = {"name": "ppo_math", "graph": {"judge": call}}
    (run / "recipe.resolved.yaml").write_text(yaml.safe_dump(recipe))
    settings = {f"graph.judge.interface.args.{name}": value for name, value in JUDGE.items()}
    (run / "origins.json").write_text(json.dumps(dict.fromkeys(settings, "mine.yaml:1:1")))
    words = [f"{key}={value}" for key, value in settings.items()]
    (run / "environment.json").write_text(json.dumps({"command": ["rlcli", "train", *words]}))
    return run


def test_no_secret_of_a_run_is_published(tmp_path):
    run = judged_run(tmp_path / "run")
    trained = TrainedModel(str(run / "models/actor"), "a model", run, "actor")
    files = files_to_push(trained, "me/sums")
    published = files["README.md"] + files["recipe.resolved.yaml"]
    assert (b"hunter22" in published, published.count(b"max_new_tokens")) == (False, 3)
    assert b"args.max_new_tokens=64" in published


def test_no_secret_of_a_run_is_on_its_page(tmp_path):
    document = json.dumps(contents([judged_run(tmp_path / "run")]))
    assert ("hunter22" in document, "<redacted>" in document) == (False, True)


def test_only_runs_are_pushed_and_only_to_valid_names(rlcli, tmp_path):
    trained_run(tmp_path / "run")
    assert rlcli("push", "run", "--to", "sums")[0] == 2
    code, _, err = rlcli("push", "run/models/actor", "--to", "me/sums")
    assert (code, "hf upload" in err) == (2, True)


def test_the_head_of_a_card_names_what_is_on_the_hub(rlcli, tmp_path):
    run = trained_run(tmp_path / "run")
    (run / "recipe.resolved.yaml").write_text(
        json.dumps(
            {
                "name": "grpo_gsm8k",
                "datasets": {
                    "train": {"type": "math_prompts", "args": {"path": "hf:openai/gsm8k"}}
                },
                "models": {"actor": {"path": "some/model"}},
            }
        )
    )
    head = yaml.safe_load(rlcli("push", "run", "--to", "me/sums", "--dry-run")[1].split("---")[1])
    assert (head["base_model"], head["datasets"]) == ("some/model", ["openai/gsm8k"])


@pytest.mark.parametrize(
    ("architecture", "auto_class", "task"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM", "text-generation"),
        ("LlamaForTokenClassification", "AutoModelForTokenClassification", "token-classification"),
    ],
)
def test_a_card_names_the_class_that_loads_the_model(
    rlcli, tmp_path, architecture, auto_class, task
):
    run = trained_run(tmp_path / "run")
    (run / "models/actor/config.json").write_text(json.dumps({"architectures": [architecture]}))
    _, out, _ = rlcli("push", "run", "--to", "me/sums", "--dry-run")
    assert yaml.safe_load(out.split("---")[1])["pipeline_tag"] == task
    assert f'model = {auto_class}.from_pretrained("me/sums")' in out
