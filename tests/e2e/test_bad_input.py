"""Each mistake is reported with its location and exit code before a run directory is created."""

import json

import pytest

TINY = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, "
    "num_attention_heads: 2}"
)


@pytest.fixture
def project(tmp_path):
    """A folder with a dataset of two rows and a recipe that fits it."""
    rows = [
        {"question": "What is 1+1?", "answer": "#### 2"},
        {"question": "What is 2+2?", "answer": "#### 4"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(
        "extends: base/ppo\n"
        f"models: {{actor: {{scratch: {TINY}, tokenizer: 'builtin:arithmetic'}}}}\n"
        "datasets: {train: {type: math_prompts, args: {path: rows.jsonl}}}\n"
        "generation: {max_new_tokens: 4}\n"
        "train: {steps: 1, prompts_per_step: 2}\n"
        "ppo: {minibatches: 2}\n"
    )
    return tmp_path


def assert_fails(done, code, *words):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    return done


@pytest.mark.long
def test_the_unchanged_recipe_trains(warm_command, project):
    done = warm_command("train", "mine.yaml", "-q", cwd=project)
    assert done.returncode == 0, done.stderr


def test_a_misspelt_key_is_reported(command, project):
    (project / "mine.yaml").write_text(
        (project / "mine.yaml").read_text().replace("steps: 1", "stepps: 1")
    )
    assert_fails(
        command("train", "mine.yaml", cwd=project),
        2,
        "error[R42] mine.yaml:5:9",
        "stepps",
        "did you mean",
        "steps",
    )
    assert not (project / "runs").exists()


def test_a_misspelt_key_on_the_command_line_is_reported(warm_command, project):
    assert_fails(
        warm_command("train", "mine.yaml", "ppo.kl_clt=0.1", cwd=project),
        2,
        "command line",
        "kl_clt",
        "kl_ctl",
    )


def test_a_missing_dataset_file_is_reported(warm_command, project):
    (project / "rows.jsonl").unlink()
    assert_fails(warm_command("train", "mine.yaml", cwd=project), 4, "mine.yaml:3:", "rows.jsonl")
    assert not (project / "runs").exists()


def test_a_missing_model_is_reported(warm_command, project):
    done = warm_command(
        "train",
        "mine.yaml",
        "models.actor.scratch=null",
        "models.actor.path=./nowhere",
        cwd=project,
    )
    assert_fails(done, 5, "nowhere")
    assert not (project / "runs").exists()


def test_a_row_without_an_answer_is_reported(warm_command, project):
    with (project / "rows.jsonl").open("a") as file:
        file.write('{"question": "What is 3+3?"}\n')
    assert_fails(warm_command("train", "mine.yaml", cwd=project), 4, "rows.jsonl:3", "answer")


def test_a_tokenizer_larger_than_the_embedding_is_reported(warm_command, project):
    done = warm_command("train", "mine.yaml", "models.actor.scratch.vocab_size=100", cwd=project)
    assert_fails(done, 5, "error[F32]", "380", "100")


def test_a_prompt_longer_than_the_limit_is_reported(warm_command, project):
    done = warm_command("train", "mine.yaml", "datasets.train.args.max_length=3", cwd=project)
    assert_fails(done, 4, "error[F30]", "rows.jsonl:1", "3")


def test_a_dataset_that_is_empty_or_smaller_than_a_step_is_reported(warm_command, project):
    assert_fails(
        warm_command("train", "mine.yaml", "train.prompts_per_step=3", cwd=project),
        4,
        "F80",
        "2 rows",
        "3",
    )
    (project / "rows.jsonl").write_text("")
    assert_fails(warm_command("train", "mine.yaml", cwd=project), 4, "error[F80]")


def test_a_model_with_code_or_pickles_is_reported(warm_command, project):
    model = project / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}'
    )
    (model / "model.safetensors").write_bytes(b"")
    settings = ("models.actor.scratch=null", "models.actor.path=./model")
    assert_fails(
        warm_command("train", "mine.yaml", *settings, cwd=project), 5, "error[S6]", "auto_map"
    )
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert_fails(
        warm_command("train", "mine.yaml", *settings, cwd=project),
        5,
        "pytorch_model.bin",
        "safetensors",
    )
