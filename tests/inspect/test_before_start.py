"""Problems are reported before anything is started: all at once, with locations,
without a run folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlcli.cli.main import main
from rlcli.errors import Errors, ModelError, RlcliError
from rlcli.inspect.before_start import check_before_start
from rlcli.inspect.checklist import preflight
from rlcli.inspect.host_memory import HostMemory
from rlcli.inspect.model_files import model_faults
from rlcli.observe.run_lock import RunLock
from rlcli.recipe.resolve import load_recipe

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 380,
}
RECIPE = """\
extends: base/sft
models: {actor: {path: model, tokenizer: builtin:arithmetic}}
datasets: {train: {type: prompt_answer, args: {path: rows.jsonl}}}
train: {steps: 1, prompts_per_step: 1}
"""
ROW = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a recipe, its rows, and a model of one shard and an index."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text(ROW)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    tensors = {
        "model.embed_tokens.weight": np.ones((380, 8), np.float32),
        "model.norm.weight": np.ones(8, np.float32),
    }
    save_file(tensors, model / "a.safetensors")
    index(model, dict.fromkeys(tensors, "a.safetensors"))
    return tmp_path


def index(model: Path, weight_map: dict[str, str]) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def faults_before_start(*overrides: str, run_dir: Path | None = None) -> list[RlcliError]:
    """The problems that are found before the recipe is started."""
    try:
        check_before_start(load_recipe("mine.yaml", overrides), run_dir, [])
    except Errors as errors:
        return list(errors.problems)
    except RlcliError as error:
        return [error]
    return []


def rlcli(*arguments: str) -> tuple[int, str]:
    """(exit code, stderr) of a command in a separate process,
    limited to 512 MiB and 2 s of processor time."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (2, 3));"
        "resource.setrlimit(resource.RLIMIT_DATA, (512 << 20,) * 2);"
        "from rlcli.cli.main import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_valid_recipe_has_no_problems(project):
    assert faults_before_start() == []
    assert sorted(os.listdir()) == ["mine.yaml", "model", "rows.jsonl"]


def test_all_missing_files_and_models_are_reported_together(project):
    (project / "start.yaml").write_text(
        RECIPE.replace("path: model", "path: ./m1").replace("rows.jsonl", "d1.jsonl")
    )
    (project / "two.yaml").write_text(
        "extends: base/ppo\n"
        'models: {actor: {path: "recipe:start.yaml#actor"}, ref: {init: null, path: '
        "./m2, tokenizer: ./t2}}\n"
        "datasets:\n"
        "  train: {type: math_prompts, args: {path: d2.jsonl}}\n"
        "  held_out: {type: math_prompts, args: {path: d3.jsonl}}\n"
        "train: {steps: 1, prompts_per_step: 2, eval: {dataset: held_out}}\n"
    )
    code, output = rlcli("train", "two.yaml")
    assert code == 4
    locations = [line.split(": ")[0] for line in output.splitlines() if line.startswith("error")]
    assert locations == [
        "error[F81] two.yaml:4:44",
        "error[F81] two.yaml:5:47",
        "error[MODEL] two.yaml:2:76",
        "error[MODEL] two.yaml:2:93",
        "error[F81] start.yaml:3:54",
        "error[MODEL] start.yaml:2:24",
    ]
    assert "6 problems; nothing was started" in output
    assert not (project / "runs").exists()


def test_json_output_has_all_errors(project, capsys):
    (project / "mine.yaml").write_text(RECIPE.replace("path: model", "path: ./gone"))
    (project / "rows.jsonl").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["check", "mine.yaml", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (ended.value.code, document["exit_code"]) == (4, 4)
    assert [problem["where"] for problem in document["problems"]] == [
        "mine.yaml:3:54",
        "mine.yaml:2:24",
    ]


def test_problems_of_rows_model_and_run_folder_are_reported_together(project):
    (project / "rows.jsonl").write_text(ROW + "{\n")
    (project / "start.yaml").write_text(RECIPE)
    (project / "used").mkdir()
    (project / "used" / "notes.txt").write_text("mine")
    (project / "mine.yaml").write_text(
        RECIPE.replace("path: model", 'path: "recipe:start.yaml#actor"')
    )
    os.truncate(project / "model" / "a.safetensors", 100)
    code, output = rlcli("train", "mine.yaml", "--run-dir", "used")
    assert code == 5
    assert "start.yaml:2:24" in output
    assert "a.safetensors: not a valid safetensors file" in output
    assert "error[F31] rows.jsonl:2: not JSON" in output
    assert "error[F72] --run-dir" in output
    assert not (project / "runs").exists()


# -- models ----------------------------------------------------------------------------------------


def damage(project: Path, kind: str) -> None:
    """Damage the folder of the model in one way."""
    model, weights = project / "model", "model.embed_tokens.weight"
    match kind:
        case "index leads out":
            (project / "b.safetensors").write_bytes((model / "a.safetensors").read_bytes())
            index(model, {weights: "../b.safetensors"})
        case "index names an absolute path":
            index(model, {weights: str(project / "b.safetensors")})
        case "index names a pickle":
            (model / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
            index(model, {weights: "pytorch_model.bin"})
        case "index names a missing shard":
            index(model, {weights: "a.safetensors", "lm_head.weight": "c.safetensors"})
        case "index names a tensor that is not there":
            index(model, {weights: "a.safetensors", "lm_head.weight": "a.safetensors"})
        case "index is no index":
            (model / "model.safetensors.index.json").write_text("[1]")
        case _:
            damage_files(project, model, kind)


def damage_files(project: Path, model: Path, kind: str) -> None:
    """The same of its files, but for its index."""
    match kind:
        case "shard is cut off":
            os.truncate(model / "a.safetensors", (model / "a.safetensors").stat().st_size - 1)
        case "shard is longer":
            with (model / "a.safetensors").open("ab") as file:
                file.write(b"x")
        case "shard is empty":
            (model / "a.safetensors").write_bytes(b"")
        case "shard is a link out":
            (model / "a.safetensors").rename(project / "b.safetensors")
            (model / "a.safetensors").symlink_to(project / "b.safetensors")
        case "only a pickle":
            (model / "a.safetensors").unlink()
            (model / "model.safetensors.index.json").unlink()
            (model / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
        case "an adapter":
            (model / "adapter_config.json").write_text("{}")
        case "a pipe":
            os.mkfifo(model / "added_tokens.json")
        case "two models":
            (model / "model.safetensors").write_bytes((model / "a.safetensors").read_bytes())
        case "a larger embedding":
            settings = {"model_type": "llama", **SIZES, "vocab_size": 200_000, "hidden_size": 4096}
            (model / "config.json").write_text(json.dumps(settings))


DAMAGES = {
    "index leads out": "S7",
    "index names an absolute path": "S7",
    "index names a pickle": "S5",
    "index names a missing shard": "MODEL",
    "index names a tensor that is not there": "MODEL",
    "index is no index": "MODEL",
    "shard is cut off": "MODEL",
    "shard is longer": "MODEL",
    "shard is empty": "MODEL",
    "shard is a link out": "S7",
    "only a pickle": "MODEL",
    "an adapter": "MODEL",
    "a pipe": "MODEL",
    "two models": "MODEL",
    "a larger embedding": "MODEL",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_train_and_check_refuse_a_damaged_or_unsafe_model_folder(project, kind):
    damage(project, kind)
    (fault,) = faults_before_start()
    assert (type(fault), fault.exit_code, fault.code, fault.where) == (
        ModelError,
        5,
        DAMAGES[kind],
        "mine.yaml:2:24",
    )
    with pytest.raises(SystemExit) as ended:
        main(["check", "mine.yaml"])
    assert ended.value.code == 5
    assert not (project / "runs").exists()


def test_disk_space_is_not_checked_for_a_model_with_wrong_sizes(project, monkeypatch):
    usage = shutil.disk_usage(project)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 10))
    assert [fault.code for fault in faults_before_start()] == ["F28"]
    damage(project, "a larger embedding")
    assert [fault.code for fault in faults_before_start()] == ["MODEL"]


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"]
)
@pytest.mark.parametrize("value", [10**9, 10**12, -1, "many", 1.5, True, [], 10**400])
def test_impossible_sizes_of_a_model_are_refused_by_name(project, key, value):
    (project / "model" / "config.json").write_text(
        json.dumps({"model_type": "no_family", **SIZES, key: value})
    )
    (fault,) = faults_before_start()
    assert key in fault.what
    assert fault.exit_code == 5
    scratch = f"{{model_type: llama, {key}: {json.dumps(value) if value != 10**400 else 10**14}}}"
    (fault,) = faults_before_start("models.actor.path=null", f"models.actor.scratch={scratch}")
    assert key in fault.what
    assert fault.exit_code in (2, 5)  # 2 if the configuration of the family finds it


def test_more_layers_than_tensors_are_refused(project):
    (project / "model" / "config.json").write_text(
        json.dumps({"model_type": "x", **SIZES, "num_hidden_layers": 9000})
    )
    assert "9000 layers; the files hold 2 tensors" in faults_before_start()[0].what


def test_a_model_from_scratch_that_exceeds_memory_is_refused(project):
    scratch = (
        "{model_type: llama, hidden_size: 262144, intermediate_size: 1048576, "
        "num_hidden_layers: 1000}"
    )
    faults = faults_before_start("models.actor.path=null", f"models.actor.scratch={scratch}")
    (fault,) = [fault for fault in faults if fault.code != "F28"]
    assert fault.exit_code == 6
    assert "GiB of memory" in fault.what


def too_large(monkeypatch, memory: int, *overrides: str) -> bool:
    of_machine = HostMemory(free=memory, total=memory)
    monkeypatch.setattr("rlcli.inspect.model_files.host_memory", lambda: of_machine)
    found_faults = faults_before_start("cluster.device=cpu", *overrides)
    return any(" of memory" in fault.what for fault in found_faults)


def test_memory_of_weights_is_counted_over_ranks_of_this_machine(project, monkeypatch):
    """Ranks that shard a model hold it once in total; replicas hold one copy per rank."""
    size = 4 * (2 * 380 * 8 + 7 * 8 * 8 + 3 * 8)
    two = ["launch=local", "cluster.devices_per_node=2", "train.prompts_per_step=2"]
    copies = ["models.actor.backend={_replace_: true, type: deepspeed, args: {zero_stage: 1}}"]
    assert not too_large(monkeypatch, size)
    assert too_large(monkeypatch, size - 1)
    assert not too_large(monkeypatch, size, *two)
    assert too_large(monkeypatch, size - 1, *two)
    assert too_large(monkeypatch, 2 * size - 1, *two, *copies)
    assert not too_large(monkeypatch, 2 * size, *two, *copies)


def test_models_in_the_hub_cache_are_checked(project, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "hub"))
    snapshot = project / "hub" / "models--owner--name" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    (project / "model").rename(snapshot)
    (project / "hub" / "models--owner--name" / "refs").mkdir()
    (project / "hub" / "models--owner--name" / "refs" / "main").write_text("1")
    assert faults_before_start("models.actor.path=owner/name") == []
    os.truncate(snapshot / "a.safetensors", 100)
    (fault,) = faults_before_start("models.actor.path=owner/name")
    assert "not a valid safetensors file" in fault.what


def test_a_model_loaded_by_an_interface_is_checked(project):
    damage(project, "index names a pickle")
    (project / "ppo.yaml").write_text(
        "extends: base/ppo\n"
        "models: {actor: {scratch: {model_type: llama, num_hidden_layers: 1}, tokenizer: "
        "builtin:arithmetic}}\n"
        "datasets: {train: arithmetic}\n"
        "graph:\n"
        "  reward_inf:\n"
        "    interface: {type: hf_reward, args: {path: model}}\n"
        "    inputs: [packed_input_ids]\n"
        "    outputs: [rewards]\n"
        "train: {steps: 1}\n"
    )
    (fault,) = model_faults(load_recipe("ppo.yaml", ["train.eval.graph={_replace_: true}"]))
    assert (fault.code, fault.where) == ("S5", "ppo.yaml:6:47")


# -- folders and disk ------------------------------------------------------------------------------


def test_a_run_folder_locked_by_another_run_is_refused(project):
    (project / "run").mkdir()
    lock = RunLock.acquire(project / "run" / "lock")
    (fault,) = faults_before_start(run_dir=project / "run")
    assert (fault.code, fault.exit_code) == ("F71", 6)
    lock.release()
    assert faults_before_start(run_dir=project / "run") == []


@pytest.mark.parametrize(
    ("folder", "code"),
    [("rows.jsonl/run", "F75"), ("model/run", "R69"), ("used", "F72"), ("/proc/run", None)],
)
def test_an_unusable_run_folder_is_refused(project, folder, code):
    (project / "used").mkdir()
    (project / "used" / "notes.txt").write_text("mine")
    found_faults = faults_before_start(run_dir=Path(folder))
    assert found_faults
    assert {fault.exit_code for fault in found_faults} == {6}
    assert code is None or code in {fault.code for fault in found_faults}
    assert not Path("model/run").exists()


def test_a_full_disk_is_reported(project, monkeypatch):
    monkeypatch.setattr("rlcli.checkpoint.disk.free_bytes", lambda _: 1000)
    (fault,) = faults_before_start()
    assert (fault.code, fault.exit_code) == ("F28", 6)


def test_only_the_first_rows_of_a_large_file_are_read(project, monkeypatch):
    monkeypatch.setattr("rlcli.inspect.before_start.READ_WHOLE", 1000)
    (project / "rows.jsonl").write_text(ROW * 1000 + "{\n")
    assert faults_before_start() == []
    (project / "rows.jsonl").write_text(ROW * 999 + "{\n")
    assert [fault.where for fault in faults_before_start()] == ["rows.jsonl:1000"]


# -- further problems ------------------------------------------------------------------------------


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(project):
    scratch = (
        "{model_type: llama, hidden_size: 8, num_hidden_layers: 1, "
        "num_attention_heads: 1, vocab_size: 100}"
    )
    (fault,) = faults_before_start("models.actor.path=null", f"models.actor.scratch={scratch}")
    assert (fault.code, fault.exit_code) == ("F32", 5)
    assert "380 tokens, but the embedding of models.actor has 100 rows" in fault.what


@pytest.mark.parametrize("section", ["generation", "evaluation.generation"])
def test_a_stop_token_that_the_model_does_not_have_is_refused(section):
    def faults(stops: str):
        return list(model_faults(load_recipe("ppo_math", [f"{section}.stop_token_ids={stops}"])))

    assert faults("[0, 379]") == []
    (fault,) = faults("[3, 380]")
    assert (fault.what, fault.where, fault.hint) == (
        "no token of models.actor has the id 380 of stop_token_ids",
        "command line",
        "its ids are below 380",
    )


def test_a_hub_model_that_is_not_cached_is_refused_offline(project, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "hub"))
    assert faults_before_start("models.actor.path=owner/name") == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (fault,) = faults_before_start("models.actor.path=owner/name")
    assert (fault.exit_code, fault.where) == (5, "command line")


@pytest.mark.long
@pytest.mark.parametrize("verb", ["train", "check", "validate", "plan"])
def test_verbs_do_not_open_pipes_or_devices(project, verb):
    (project / "rows.jsonl").unlink()
    os.mkfifo(project / "rows.jsonl")
    code, output = rlcli(verb, "mine.yaml")
    assert (code, output.partition(":")[0]) == (4, "error[F81] mine.yaml")
    code, output = rlcli(verb, "mine.yaml", "datasets.train.args.path=/dev/zero")
    assert (code, "/dev/zero is not an ordinary file" in output) == (4, True)
    os.mkfifo(project / "pipe.yaml")
    assert rlcli(verb, "pipe.yaml")[0] == 2
    assert not (project / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"]
)
def test_pipes_and_devices_as_files_of_a_model_are_refused(project, name):
    (project / "model" / name).unlink(missing_ok=True)
    os.mkfifo(project / "model" / name)
    code, output = rlcli("train", "mine.yaml", "models.actor.tokenizer=null")
    assert code == 5, output
    (project / "model" / name).unlink()
    (project / "model" / name).symlink_to("/dev/zero")
    code, output = rlcli("train", "mine.yaml", "models.actor.tokenizer=null")
    assert code == 5, output


def test_heads_not_divisible_among_tensor_parallel_ranks_are_refused(project):
    sizes = {"model_type": "llama", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
    (project / "model" / "config.json").write_text(json.dumps(sizes))
    (project / "mine.yaml").write_text(
        RECIPE.replace("path: model,", "path: model, mesh: {tp: 4},")
    )
    devices = ("launch=local", "cluster.devices_per_node=4", "train.prompts_per_step=2")
    (fault,) = faults_before_start(*devices)
    assert fault.code == "R49"
    assert (
        fault.what
        == "the 2 key-value heads of models.actor cannot be divided among 4 tensor-parallel ranks"
    )
    assert fault.where.endswith("mine.yaml:2:42")
    nearest = "the nearest layout that it can run is dp2 tp2: models.actor.mesh.tp=2"
    assert fault.hint == nearest
    (project / "rows.jsonl").write_text(2 * ROW)
    assert faults_before_start(*devices, "models.actor.mesh.tp=2") == []


def test_heads_that_ulysses_cannot_divide_are_refused(project):
    sizes = {"model_type": "llama", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
    (project / "model" / "config.json").write_text(json.dumps(sizes))
    (project / "rows.jsonl").write_text(2 * ROW)
    devices = ["launch=local", "train.prompts_per_step=1"]
    layout = [*devices, "cluster.devices_per_node=4", "models.actor.mesh={tp: 2, cp: 2}"]
    chosen = "models.actor.backend.args.context_parallel"
    assert faults_before_start(*layout, f"{chosen}=ulysses") == []
    wide = [*devices, "cluster.devices_per_node=8", "models.actor.mesh={cp: 8}"]
    (fault,) = faults_before_start(*wide, f"{chosen}=ulysses")
    assert (fault.code, fault.where) == ("R49", "command line")
    assert "cannot divide the 4 attention heads of models.actor among 8" in fault.what
    assert fault.hint.startswith(f"{chosen}=ring")
    assert faults_before_start(*wide) == []


@pytest.mark.parametrize(
    ("sizes", "finding", "hint"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 6},
            "has 6 experts",
            "dp4 ep2: models.actor.mesh.ep=2",
        ),
        ({"model_type": "llama"}, "has no experts", "dp4: models.actor.mesh.ep=1"),
    ],
)
def test_experts_not_divisible_among_expert_parallel_ranks_are_refused(
    project, sizes, finding, hint
):
    (project / "model" / "config.json").write_text(json.dumps({**SIZES, **sizes}))
    (project / "rows.jsonl").write_text(4 * ROW)
    (project / "mine.yaml").write_text(
        RECIPE.replace("path: model,", "path: model, mesh: {ep: 4},")
    )
    devices = ("launch=local", "cluster.devices_per_node=4", "train.prompts_per_step=4")
    (fault,) = faults_before_start(*devices)
    assert fault.code == "R49"
    assert fault.what == (
        f"models.actor {finding}, which cannot be divided among 4 expert-parallel ranks"
    )
    assert fault.where.endswith("mine.yaml:2:42")
    assert fault.hint == f"the nearest layout that it can run is {hint}"


@pytest.mark.parametrize(
    ("changes", "finding", "setting"),
    [
        (["mesh.pp=2"], "", ""),
        (["mesh.pp=4"],
         "the 6 blocks of models.actor cannot be divided among 4 pipeline stages", "mesh.pp=2"),
        (["mesh.pp=2", "backend.args.virtual_stages=3"], "", ""),
        (["mesh.pp=2", "backend.args.virtual_stages=2"],
         "2 virtual stages cannot divide the 3 blocks of a stage of models.actor",
         "backend.args.virtual_stages=1"),
        (["mesh.dp=2", "backend.args.virtual_stages=2"],
         "models.actor has 2 virtual stages, but its pipeline has one stage",
         "backend.args.virtual_stages=1"),
    ],
)  # fmt: skip
def test_layers_not_divisible_among_stages_are_refused(project, changes, finding, setting):
    sizes = {"model_type": "llama", **SIZES, "num_hidden_layers": 6}
    (project / "model" / "config.json").write_text(json.dumps(sizes))
    (project / "rows.jsonl").write_text(4 * ROW)
    ranks = int(changes[0][-1])
    faults = faults_before_start(
        "launch=local",
        f"cluster.devices_per_node={ranks}",
        "train.prompts_per_step=2",
        "models.actor.backend.type=megatron",
        *(f"models.actor.{change}" for change in changes),
    )
    refused = [fault for fault in faults if fault.code == "R49"]
    assert [fault.what for fault in refused] == ([finding] if finding else [])
    assert all(f"models.actor.{setting}" in fault.hint for fault in refused)


def test_components_of_warm_starts_are_built_before_the_first_run():
    """Also those of a warm start, whose arguments are valid alone but not together."""
    valid, contradictory = (
        load_recipe("sft_math"),
        load_recipe("ppo_math", ["ppo.overlong_buffer=1000"]),
    )
    with pytest.raises(RlcliError, match="overlong_buffer is 1000; it must be at most") as caught:
        check_before_start(valid, None, [contradictory])
    assert caught.value.where == "command line"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(response)\n    return 1.0\n", "SyntaxError"),
        ("def scor(response):\n    return 1.0\n", "has no attribute 'score'"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
    ],
)
def test_a_reward_function_that_cannot_be_loaded_is_refused(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(source)
    reward = "graph.reward_inf.interface={type: function_reward, args: {path: mine.py}}"
    with pytest.raises(RlcliError, match=message) as caught:
        check_before_start(load_recipe("ppo_math", [reward]), None, [])
    assert caught.value.code == "F51"
    Path("mine.py").write_text("def score(response):\n    return 1.0\n")
    check_before_start(load_recipe("ppo_math", [reward]), None, [])


def test_check_reports_heads_not_divisible_among_ranks():
    overrides = [
        "models.actor.mesh.tp=3",
        "cluster.devices_per_node=3",
        "launch=local",
        "train.prompts_per_step=60",
    ]
    failures = [
        finding
        for finding in preflight(load_recipe("ppo_math", overrides), rows=2)
        if finding.level == "FAIL"
    ]
    assert [finding.code for finding in failures] == ["R49"]
    assert "4 attention heads of models.actor cannot be divided among 3" in failures[0].says
