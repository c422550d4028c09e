"""What `convert` refuses, and that it leaves no files behind then."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcli.api.model_source import open_source
from rlcli.api.weight_files import INDEX
from rlcli.checkpoint import tensor_writing
from rlcli.checkpoint.conversion_check import check_conversion
from rlcli.checkpoint.convert import convert, plan_from_hf, plan_to_hf
from rlcli.errors import ModelError, NumericError, ResourceError

from . import family_models


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Writes the folder of a variant as transformers saves it."""

    def folder(variant):
        saved = family_models.save(
            family_models.make_model(variant), tmp_path_factory.mktemp(variant)
        )
        (saved / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
        return saved

    return folder


def _run(plan):
    convert(plan, _ignore_progress)
    return plan.target


def _ignore_progress(written):
    pass


def _check(plan):
    convert(plan, _ignore_progress, lambda folder: check_conversion(plan, folder))


def _bytes(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def copy(hub, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(hub("llama"), folder)
    return folder


@pytest.fixture
def sharded(hub, tmp_path):
    return _run(plan_from_hf(hub("llama"), tmp_path / "sharded", ranks=3))


def test_an_existing_target_is_refused(copy, tmp_path):
    for name in ("folder", "file", "link"):
        target = tmp_path / name
        target.mkdir() if name == "folder" else target.write_text(
            ""
        ) if name == "file" else target.symlink_to("nowhere")
        with pytest.raises(ResourceError, match="exists") as caught:
            _run(plan_to_hf(copy, target))
        assert caught.value.code == "F72"


def _leftovers(tmp_path, source):
    return sorted(path.name for path in tmp_path.iterdir() if path != source)


def test_too_little_free_space_is_reported_before_writing(copy, tmp_path, monkeypatch):
    plan = plan_to_hf(copy, tmp_path / "new" / "out")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=plan.bytes))
    with pytest.raises(ResourceError, match="are free") as caught:
        _run(plan)
    assert (caught.value.code, caught.value.exit_code) == ("F28", 6)
    assert _leftovers(tmp_path, copy) == []


def test_a_disk_that_fills_up_leaves_no_files(copy, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(ResourceError, match="No space left") as caught:
        _run(plan_to_hf(copy, tmp_path / "out"))
    assert caught.value.code == "F28"
    assert _leftovers(tmp_path, copy) == []


def test_an_interrupt_leaves_no_files(copy, tmp_path):
    def interrupt(written):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan_to_hf(copy, tmp_path / "out"), interrupt)
    assert _leftovers(tmp_path, copy) == []


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS])
def test_files_are_copied_without_copy_file_range(code, copy, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(code, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(tensor_writing, "CHUNK", 1000)
    target = _run(plan_to_hf(copy, tmp_path / "out"))
    assert (target / "model.safetensors").read_bytes() == (copy / "model.safetensors").read_bytes()


def test_the_result_does_not_depend_on_the_chunk_size(copy, tmp_path, monkeypatch):
    expected = _run(plan_from_hf(copy, tmp_path / "expected", ranks=3, dtype="bfloat16"))
    monkeypatch.setattr(tensor_writing, "CHUNK", 24)
    monkeypatch.setattr(tensor_writing, "CAST_CHUNK", 24)
    actual = _run(plan_from_hf(copy, tmp_path / "found", ranks=3, dtype="bfloat16"))
    assert _bytes(actual) == _bytes(expected)


def test_progress_counts_every_byte(copy, tmp_path):
    counts = []
    plan = plan_to_hf(copy, tmp_path / "out", dtype="bfloat16")
    convert(plan, counts.append)
    assert sum(counts) == plan.bytes


def test_parts_of_a_model_are_no_source_of_weights(sharded):
    with pytest.raises(ModelError, match="in parts, one for each rank") as caught:
        open_source(str(sharded), head="lm", tokenizer=None, seed=0)
    assert caught.value.hint == f"join them: rlcli convert {sharded} --to-hf DIR"


def test_a_missing_rank_is_reported(sharded, tmp_path):
    (sharded / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ModelError, match=r"a piece of .* is missing"):
        plan_to_hf(sharded, tmp_path / "out")


def test_a_missing_last_rank_is_reported(sharded, tmp_path):
    (sharded / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ModelError, match="rows, but the vocabulary of config"):
        plan_to_hf(sharded, tmp_path / "out")


def test_a_duplicate_rank_is_reported(sharded, tmp_path):
    shutil.copy(
        sharded / "shard-00002-model-00001-of-00001.safetensors",
        sharded / "shard-00004-model-00001-of-00001.safetensors",
    )
    with pytest.raises(ModelError, match="stored twice"):
        plan_to_hf(sharded, tmp_path / "out")


def test_two_formats_in_one_folder_are_reported(copy, sharded, tmp_path):
    shutil.copy(next(sharded.glob("shard-*")), copy)
    with pytest.raises(ModelError, match="two models"):
        plan_to_hf(copy, tmp_path / "out")


def test_missing_weights_of_experts_are_reported(hub, tmp_path):
    folder = tmp_path / "torn"
    shutil.copytree(hub("mixtral"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"needs layers\.1\.mlp\.experts\.2\.up\.weight"):
        plan_from_hf(folder, tmp_path / "out", ranks=2)


def test_numbers_too_large_for_float16_are_refused(copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds 1e\+06"):
        _run(plan_to_hf(copy, tmp_path / "out", dtype="float16"))
    assert _leftovers(tmp_path, copy) == []


def test_the_check_finds_a_changed_byte(sharded, tmp_path):
    def tamper(folder):
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-10] ^= 1  # of the last tensor, in no way that a number would show
        file.write_bytes(content)
        check_conversion(plan, folder)

    plan = plan_to_hf(sharded, tmp_path / "out")
    with pytest.raises(ModelError, match=r"1 parameters differ from the source"):
        convert(plan, _ignore_progress, tamper)
    assert not plan.target.exists()


QUERY = "model.layers.0.self_attn.q_proj.weight"


def _swap(tensors, first, second):
    tensors[first], tensors[second] = tensors[second], tensors[first]


def _swap_layers(tensors):
    for name in [name for name in tensors if ".layers.0." in name]:
        _swap(tensors, name, name.replace(".layers.0.", ".layers.1."))


def _interleave_rotary_halves(tensors):
    """As in formats that rotate neighbouring elements rather than halves."""
    halves = tensors[QUERY].unflatten(0, (4, 2, 4))  # [heads, halves, head_dim / 2, hidden]
    tensors[QUERY] = halves.transpose(1, 2).flatten(0, 2).contiguous()


FAULTS = {
    "gate and up": (
        2,
        lambda t: _swap(t, *(f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up"))),
    ),
    "two layers": (18, _swap_layers),
    "a transposed matrix": (1, lambda t: t.update({QUERY: t[QUERY].t().contiguous()})),
    "rotary halves": (1, _interleave_rotary_halves),
    "the last bit of a number": (1, lambda t: t[QUERY][3, 5:6].view(torch.int32).bitwise_xor_(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_typical_conversion_errors(fault, copy, tmp_path):
    def plant(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        check_conversion(plan, folder)

    count, change = FAULTS[fault]
    plan = plan_to_hf(copy, tmp_path / "out")
    with pytest.raises(ModelError, match=f"{count} parameters differ from the source"):
        convert(plan, _ignore_progress, plant)
    assert not plan.target.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1.1e-6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10001.0}},
    ],
)
def test_the_check_finds_a_changed_configuration(changes, copy, tmp_path):
    """Only the last digits of the logits reveal it."""

    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        check_conversion(plan, folder)

    plan = plan_to_hf(copy, tmp_path / "out")
    with pytest.raises(ModelError, match="logits differ"):
        convert(plan, _ignore_progress, change)


def test_the_check_finds_numbers_that_are_not_finite(copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(NumericError, match=r"model\.norm\.weight"):
        _check(plan_to_hf(copy, tmp_path / "out"))


def test_the_check_finds_a_name_that_transformers_lacks(copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"misses 1 parameters .* model\.layers\.2\.mlp\.down_proj"
    ):
        _check(plan_to_hf(copy, tmp_path / "out"))


# -- untrusted input -------------------------------------------------------------------------------


def test_formats_other_than_safetensors_are_refused(copy, tmp_path):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*save_pretrained"):
        plan_to_hf(copy, tmp_path / "out")


def test_a_model_with_custom_code_is_refused(copy, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}})
    )
    with pytest.raises(ModelError) as caught:
        plan_to_hf(copy, tmp_path / "out")
    assert caught.value.code == "S6"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_links_out_of_the_folder_are_refused(name, copy, tmp_path):
    shutil.move(copy / name, tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError) as caught:
        plan_to_hf(copy, tmp_path / "out")
    assert caught.value.code == "S7"


def test_links_within_a_hub_cache_are_followed(copy, tmp_path):
    cache = tmp_path / "hub" / "models--me--mine"
    (cache / "blobs").mkdir(parents=True)
    shutil.move(copy, cache / "snapshots" / "abc")
    for number, file in enumerate((cache / "snapshots" / "abc").glob("*.*")):
        shutil.move(file, cache / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    target = _run(plan_to_hf(cache / "snapshots" / "abc", tmp_path / "out"))
    assert not any(file.is_symlink() for file in target.rglob("*"))
    assert len(family_models.stored(target)) == 30


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin"]
)
def test_an_index_with_files_outside_the_folder_is_refused(name, copy, tmp_path):
    (copy / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError) as caught:
        plan_to_hf(copy, tmp_path / "out")
    assert caught.value.code == ("S5" if name.endswith(".bin") else "S7")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("index", b"[]"),
        ("index", b'{"weight_map": {"a": "missing.safetensors"}}'),
        ("config.json", b"[1]"),
        ("config.json", b"{"),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b"\x08" + b"\0" * 7 + b"not json"),
    ],
)
def test_files_with_invalid_content_are_refused(name, content, copy, tmp_path):
    (copy / (INDEX if name == "index" else name)).write_bytes(content)
    with pytest.raises(ModelError):
        plan_to_hf(copy, tmp_path / "out")


def test_a_truncated_file_is_refused(copy, tmp_path):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match="not a valid safetensors file"):
        plan_to_hf(copy, tmp_path / "out")


@pytest.mark.parametrize(("variant", "changes"), [
    ("llama", {"num_hidden_layers": 10**12}),
    ("mixtral", {"num_hidden_layers": 10**12}),
    ("qwen3_moe", {"num_local_experts": 10**12}),
    ("qwen3_moe", {"num_local_experts": {}}),
    ("qwen3_moe", {"mlp_only_layers": 3}),
    ("gpt2", {"n_layer": 10**12}),
    ("llama", {"num_hidden_layers": 9_999}),
    ("llama", {"rope_parameters": "x"}),
    ("llama", {"intermediate_size": -1}),
])  # fmt: skip
def test_a_configuration_with_absurd_sizes_is_refused(variant, changes, hub, tmp_path):
    folder = hub(variant)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError):
        plan_to_hf(folder, tmp_path / "out")


@pytest.mark.parametrize("offsets", [[-1, 0], [0], ["0", 0], None, [0.5, 0]])
def test_invalid_offsets_are_refused(offsets, copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    shards = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    shards["lm_head.weight"]["saved_offsets"] = offsets
    metadata = {"DCP_SHARDING_INFO": json.dumps(shards)}
    save_file(tensors, copy / "shard-00001-model-00001-of-00001.safetensors", metadata=metadata)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        plan_to_hf(copy, tmp_path / "out")
