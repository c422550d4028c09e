"""The Python interface in a notebook: a real kernel, real runs of a small model."""

import os
import signal
import threading
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

# three runs, each of which loads torch
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(420)]

HOME = Path(__file__).parents[2]
TINY = {
    "models.actor.scratch": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    },
    "train.prompts_per_step": 8,
    "log.trackers": [],
}
CELLS = {
    "import": """
import os, sys
before = set(sys.modules)
import rlcli
print(sorted({"torch", "numpy", "rich", "typer"} & (set(sys.modules) - before)))
open("kernel.pid", "w").write(str(os.getpid()))
""",
    "train": f'run = rlcli.train("sft_math", {{**{TINY!r}, "train.steps": 3}})',
    "show": "run",
    "read": """
loss = run.metrics["loss"]
print(loss.shape, bool((loss > 0).all()), run.metrics.steps.tolist(), run.state)
""",
    "model": """
model, tokenizer = run.model("actor"), run.tokenizer("actor")
print(type(model).__name__, len(tokenizer) <= model.config.vocab_size)
""",
    "mistake": 'rlcli.train("sft_math", {"trian.steps": 3})',
    "long": f"""
rlcli.train("sft_math", {{**{TINY!r}, "train.steps": 100_000}}, run_dir="long")
""",
    "stopped": """
stopped = rlcli.run("long")
print(stopped.state, stopped.step)
steps = {"train.steps": stopped.step + 2}
print(stopped.resume(steps, accept_changes=True).state, stopped.step == steps["train.steps"])
""",
}


def interrupt_once_training(folder):
    """Interrupt the kernel as a notebook does: its whole process group."""
    metrics = folder / "long/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.05)
    os.killpg(int((folder / "kernel.pid").read_text()), signal.SIGINT)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Cell → its outputs, after all cells were executed in turn."""
    folder = tmp_path_factory.mktemp("notebook")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        os.environ[name] = str(folder / name)
    os.environ["PYTHONPATH"] = str(HOME)
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS.values()]
    threading.Thread(target=interrupt_once_training, args=(folder,), daemon=True).start()
    executed = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=300,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return {name: cell.outputs for name, cell in zip(CELLS, executed.cells, strict=True)}


def printed(outputs, stream="stdout"):
    return "".join(
        output.text for output in outputs if output.get("name") == stream and "text" in output
    )


def errors(outputs):
    return [(output.ename, output.evalue) for output in outputs if output.output_type == "error"]


def test_the_import_loads_nothing_heavy(outputs):
    assert printed(outputs["import"]) == "[]\n"


def test_a_cell_shows_progress_in_one_output_that_is_replaced(outputs):
    assert errors(outputs["train"]) == []
    (picture,) = (o for o in outputs["train"] if o.output_type == "display_data")
    assert "step 3/3" in picture.data["text/plain"]
    assert "now:" not in picture.data["text/plain"]
    assert picture.data["text/html"].startswith("<pre")
    assert "  ->  runs/sft_math/" in printed(outputs["train"])
    assert printed(outputs["train"], "stderr") == ""


def test_a_run_is_shown_with_its_curves(outputs):
    (shown,) = outputs["show"]
    assert "state done step 3/3" in shown.data["text/plain"]
    assert 'src="data:image/png;base64,' in shown.data["text/html"]


def test_metrics_are_arrays(outputs):
    assert printed(outputs["read"]) == "(3,) True [1, 2, 3] done\n"


def test_a_trained_model_is_loaded_with_its_tokenizer(outputs):
    assert printed(outputs["model"]) == "LlamaForCausalLM True\n"
    assert printed(outputs["model"], "stderr") == ""


def test_a_mistake_in_a_recipe_raises_the_error_that_the_command_prints(outputs):
    ((kind, message),) = errors(outputs["mistake"])
    assert kind == "RecipeError"
    assert "unknown key trian" in message
    assert "did you mean train" in message
    assert printed(outputs["mistake"], "stderr") == ""


def test_an_interrupted_cell_leaves_a_run_that_can_be_resumed(outputs):
    assert [kind for kind, _ in errors(outputs["long"])] == ["KeyboardInterrupt"]
    assert "finishing this step, then saving" in printed(outputs["long"])
    state, *_, continued = printed(outputs["stopped"]).splitlines()
    assert state.startswith("stopped ")
    assert continued == "done True"
