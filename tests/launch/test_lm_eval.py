"""Tasks of lm-eval by `rlcli eval MODEL --tasks`. Skipped where lm-eval is missing."""

import json

import pytest
import torch
from chat_model import write_chat_model

from rlcli.cli.main import main

TASK = """\
task: halves
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
QUESTIONS = [(f"Half of {2 * n} is", [f" {n}", f" {n + 1}"]) for n in range(6)]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A file that describes a task: which of two answers is likelier. The first is right."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        {"question": question, "choices": choices, "gold": 0} for question, choices in QUESTIONS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "halves.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    return str(tmp_path / "halves.yaml")


def evaluate(model, task):
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(model), "--tasks", task, "--json"])
    return ended.value.code or 0


def loglikelihood(model, tokenizer, question, answer):
    """That of an answer to a question, by transformers alone."""
    tokens = torch.tensor(tokenizer(question + answer).input_ids)
    with torch.no_grad():
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
    return float(chosen[len(tokenizer(question).input_ids) - 1 :].sum())


@pytest.fixture
def folder(tmp_path, capsys):
    """A model's folder. What libraries print as it is written is discarded."""
    written = write_chat_model(tmp_path / "model", positions=64)
    capsys.readouterr()
    return written


def test_accuracy_in_a_task_of_a_file_is_that_of_the_model(task, folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert evaluate(folder, task) == 0
    results = json.loads(capsys.readouterr().out)["results"]["halves"]
    model, tokenizer = (
        cls.from_pretrained(folder) for cls in (AutoModelForCausalLM, AutoTokenizer)
    )
    right = [
        loglikelihood(model, tokenizer, question, first)
        > loglikelihood(model, tokenizer, question, second)
        for question, (first, second) in QUESTIONS
    ]
    assert results["acc"]["value"] == pytest.approx(sum(right) / len(right))


def test_a_model_without_weights_is_refused_in_one_line(task, folder, capsys):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert evaluate(folder, task) == 5
    error = capsys.readouterr().err
    assert str(folder) in error
    assert "Traceback" not in error
