import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcli.api.model_export import own_weights
from rlcli.api.weight_files import INDEX
from rlcli.checkpoint import conversion_check
from rlcli.checkpoint.conversion_check import check_conversion
from rlcli.checkpoint.convert import convert, parse_size, plan_from_hf, plan_to_hf
from rlcli.checkpoint.state import HostCopy, TensorPart, write_weights
from rlcli.checkpoint.tensor_files import stored_tensors
from rlcli.errors import ModelError, UsageError
from rlcli.testing.tiny_models import tiny_model

from . import family_models


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Returns the folder of a variant as transformers saves it; each is written once."""
    folders = {}

    def folder(variant, head="lm", dtype=torch.float32):
        key = (variant, head, dtype)
        if key not in folders:
            model = family_models.make_model(variant, head=head)
            folders[key] = family_models.save(model, tmp_path_factory.mktemp(variant), dtype)
            (folders[key] / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
            (folders[key] / "chat_template.jinja").write_bytes("{{ 'ä' }}\r\n".encode())
            (folders[key] / "additional_chat_templates").mkdir()
            (folders[key] / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
            (folders[key] / "modeling_evil.py").write_text("raise SystemExit")
        return folders[key]

    return folder


def _ignore_progress(written):
    pass


def _run(plan, check=None):
    convert(plan, _ignore_progress, check)
    return plan.target


def _check(plan):
    results = []
    convert(plan, _ignore_progress, lambda folder: results.append(check_conversion(plan, folder)))
    return results[0]


def _bytes(folder):
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("variant", family_models.VARIANTS)
def test_conversion_to_ranks_and_back_restores_the_folder(variant, hub, tmp_path):
    source = hub(variant)
    sharded = _run(plan_from_hf(source, tmp_path / "sharded", ranks=3))
    again = _run(plan_to_hf(sharded, tmp_path / "again"))
    expected = _bytes(source)
    del expected["modeling_evil.py"]
    assert _bytes(again) == expected


def test_an_embedding_may_be_larger_than_what_each_rank_has(tmp_path):
    """A folder whose config.json describes more than its files hold is refused:
    their pieces count together."""
    source, sharded = tmp_path / "source", tmp_path / "sharded"
    tiny_model("llama").save_pretrained(source)
    again = _run(plan_to_hf(_run(plan_from_hf(source, sharded, ranks=16)), tmp_path / "again"))
    assert _bytes(again) == _bytes(source)


@pytest.mark.parametrize("variant", ["llama-tied", "gpt2", "qwen3_moe", "mixtral-tied"])
def test_the_check_counts_all_parameters_and_tensors(variant, hub, tmp_path):
    source = hub(variant, dtype=torch.bfloat16)
    parameters = len(dict(family_models.make_model(variant).named_parameters()))
    sharded = plan_from_hf(source, tmp_path / "sharded", ranks=2)
    assert _check(sharded).parameters == parameters
    back = _check(plan_to_hf(sharded.target, tmp_path / "back"))
    assert (back.max_difference, back.tensors) == (0.0, len(family_models.stored(source)))
    assert back.tied == variant.endswith("tied")


@pytest.mark.parametrize("ranks", [2, 5])
def test_torch_reads_a_converted_sharded_model(ranks, hub, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    source = hub("qwen3_moe")
    target = _run(plan_from_hf(source, tmp_path / "sharded", ranks=ranks))
    assert len(list(target.glob("shard-*.safetensors"))) == ranks
    expected = {
        name: p.detach() for name, p in family_models.make_model("qwen3_moe").named_parameters()
    }
    actual = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():  # that there is one process
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(actual, storage_reader=HuggingFaceStorageReader(str(target)), no_dist=True)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_keys_of_shard_headers_equal_those_of_torch():
    from torch.distributed.checkpoint import _hf_utils

    from rlcli.checkpoint import tensor_files

    assert (tensor_files.SHARDING, tensor_files.OFFSETS) == (
        _hf_utils.CUSTOM_METADATA_KEY,
        _hf_utils.SAVED_OFFSETS_KEY,
    )


def _host_copy(tensors, rank, axis=0, ranks=2):
    parts = {}
    for name, tensor in tensors.items():
        cut = axis if tensor.dim() > axis else 0
        chunks = tensor.chunk(ranks, dim=cut)
        if rank < len(chunks):
            offsets = [0] * tensor.dim()
            offsets[cut] = sum(chunk.shape[cut] for chunk in chunks[:rank])
            parts[name] = (
                TensorPart(chunks[rank].contiguous(), tuple(offsets), tuple(tensor.shape)),
            )
    return HostCopy(parts, {}, is_whole=False, leads=rank == 0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_a_checkpoint_written_by_two_ranks_is_converted(variant, axis, hub, tmp_path):
    """Sharded by rows as FSDP does, or by columns as tensor parallelism does."""
    source, role = hub(variant), tmp_path / "role"
    tensors = {name: p.detach() for name, p in family_models.make_model(variant).named_parameters()}
    shutil.copytree(source, role, ignore=shutil.ignore_patterns("*.safetensors"))
    for rank in range(2):
        write_weights(_host_copy(tensors, rank, axis), role, rank)
    target = _run(plan_to_hf(role, tmp_path / "out"))
    assert (target / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3_moe"])
def test_a_checkpoint_written_by_one_rank_is_converted(variant, hub, tmp_path):
    """In one file, under the names of the module, which for mixtures of experts differ from those
    in files."""
    source, role = hub(variant), tmp_path / "role"
    tensors = {name: p.detach() for name, p in family_models.make_model(variant).named_parameters()}
    shutil.copytree(source, role, ignore=shutil.ignore_patterns("*.safetensors"))
    parts = {
        name: (TensorPart(tensor, (0,) * tensor.dim(), tuple(tensor.shape)),)
        for name, tensor in tensors.items()
    }
    write_weights(HostCopy(parts, {}, is_whole=True, leads=True), role, 0)
    plan = plan_to_hf(role, tmp_path / "out")
    _check(plan)
    assert (plan.target / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


def _mixture(folder):
    """A model of a family that transformers knows and nobody has written here: its files hold each
    expert, and the bias of its router is a buffer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
    config = AutoConfig.for_model(
        "glm4_moe", **family_models.GQA, **experts, num_experts_per_tok=2, head_dim=8
    )
    model = AutoModelForCausalLM.from_config(config)
    for buffer in model.buffers():
        buffer.normal_()
    return model, family_models.save(model, folder)


def test_a_checkpoint_of_a_family_that_nobody_wrote_becomes_what_transformers_saves(tmp_path):
    model, source = _mixture(tmp_path / "source")
    role = tmp_path / "role"
    shutil.copytree(source, role, ignore=shutil.ignore_patterns("*.safetensors"))
    for rank in range(2):
        write_weights(_host_copy(own_weights(model), rank), role, rank)
    plan = plan_to_hf(role, tmp_path / "out")
    _check(plan)
    assert plan.changes_names
    expected, written = family_models.stored(source), family_models.stored(plan.target)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    again = _run(plan_to_hf(plan.target, tmp_path / "again"))
    assert _bytes(again) == _bytes(plan.target)
    with pytest.raises(ModelError, match=r"another form than its modules, and no family glm4_moe"):
        plan_from_hf(source, tmp_path / "sharded", ranks=2)


def test_a_model_without_its_head_is_converted(tmp_path):
    source = family_models.save(tiny_model("llama").model, tmp_path / "source")
    sharded = plan_from_hf(source, tmp_path / "sharded", ranks=2)
    assert _check(sharded).parameters == 20
    assert _check(plan_to_hf(sharded.target, tmp_path / "back")).parameters == 20


@pytest.mark.parametrize("padding", [0, 24, 40])
def test_logits_of_the_check_do_not_depend_on_alignment_in_files(padding, hub, tmp_path):
    """On some processors the rounding of matrix products depends on addresses, so weights need
    equal alignment."""
    source, moved = hub("qwen3_moe"), tmp_path / "moved"
    shutil.copytree(source, moved)
    save_file(
        load_file(moved / "model.safetensors"),
        moved / "model.safetensors",
        metadata={"x": "x" * padding},
    )
    original, shifted = (
        conversion_check._loaded(folder, torch.float32, None).eval() for folder in (source, moved)
    )
    for model in (original, shifted):
        conversion_check._align(model)
    alignments = {
        tensor.data_ptr() % 64
        for tensor in (*original.parameters(), *shifted.parameters(), *shifted.buffers())
    }
    assert alignments == {0}
    assert torch.equal(conversion_check._logits(original), conversion_check._logits(shifted))


def test_a_critic_is_converted(hub, tmp_path):
    source = hub("qwen2", head="value")
    sharded = plan_from_hf(source, tmp_path / "sharded", ranks=2)
    _check(sharded)
    back = plan_to_hf(sharded.target, tmp_path / "back")
    _check(back)
    assert "score.weight" in stored_tensors(back.target)


@pytest.mark.parametrize("family", ["gpt2", "cohere"])
def test_critics_with_other_head_names_or_derived_classes_are_converted(family, tmp_path):
    model = tiny_model(family, head="value")
    source = family_models.save(model, tmp_path / "source")
    sharded = plan_from_hf(source, tmp_path / "sharded", ranks=2)
    assert _check(sharded).parameters == len(list(model.parameters()))
    back = plan_to_hf(sharded.target, tmp_path / "back")
    assert _check(back).parameters == len(list(model.parameters()))
    assert (back.target / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


def test_a_reward_model_for_sequence_classification_is_converted(tmp_path):
    """The check loads the class that config.json names."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "qwen3", **{**family_models.GQA, "pad_token_id": None}, num_labels=1
    )
    model = AutoModelForSequenceClassification.from_config(config)
    source = family_models.save(model, tmp_path / "source")
    plan = plan_from_hf(source, tmp_path / "sharded", ranks=2)
    assert plan.notes == ("not a parameter of qwen3, kept as it is: score.weight",)
    _check(plan)
    back = plan_to_hf(plan.target, tmp_path / "back")
    _check(back)
    assert (back.target / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_cast_to_the_requested_dtype(dtype, hub, tmp_path):
    source = hub("qwen3-tied-yarn", dtype=torch.bfloat16 if dtype == "float32" else torch.float32)
    plan = plan_to_hf(source, tmp_path / "out", dtype=dtype)
    assert _check(plan).max_difference == 0.0
    expected = {
        name: tensor.to(getattr(torch, dtype))
        for name, tensor in family_models.stored(source).items()
    }
    actual = family_models.stored(plan.target)
    assert actual.keys() == expected.keys()
    assert all(
        actual[n].dtype == expected[n].dtype and torch.equal(actual[n], expected[n])
        for n in expected
    )
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, plan.target)
    )
    assert after == {**before, "dtype": dtype}


def test_tensors_that_transformers_keeps_in_float32_stay_so(tmp_path):
    """The biases of routers, which 16 bits would change by more than what they decide."""
    _, source = _mixture(tmp_path / "source")
    plan = plan_to_hf(source, tmp_path / "out", dtype="bfloat16")
    assert _check(plan).max_difference == 0.0
    wide = {name for name, tensor in family_models.stored(plan.target).items()
            if tensor.dtype is torch.float32}  # fmt: skip
    gates = {f"model.layers.{index}.mlp.gate" for index in (1, 2)}
    assert wide == {f"{gate}.{n}" for gate in gates for n in ("weight", "e_score_correction_bias")}


@pytest.mark.parametrize(
    ("key", "changes"), [("dtype", False), ("torch_dtype", False), (None, True)]
)
def test_config_json_has_the_dtype_of_the_weights(key, changes, hub, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(hub("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {key: config["dtype"]} if key else {}
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "dtype" or key == "dtype"})
    )
    for dtype in (None, "float32"):
        target = _run(plan_to_hf(folder, tmp_path / f"out-{dtype}", dtype=dtype))
        assert (
            (target / "config.json").read_bytes() != (folder / "config.json").read_bytes()
        ) is changes
    assert json.loads((target / "config.json").read_text())[key or "dtype"] == "float32"
    half = _run(plan_to_hf(folder, tmp_path / "half", dtype="float16"))
    written = json.loads((half / "config.json").read_text())
    assert (written["dtype"], "torch_dtype" in written) == ("float16", False)


def test_parts_of_config_json_get_the_requested_dtype(hub, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(hub("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] = {"dtype": "float32", "depth": 2}
    (folder / "config.json").write_text(json.dumps(config))
    target = _run(plan_to_hf(folder, tmp_path / "out", dtype="bfloat16"))
    written = json.loads((target / "config.json").read_text())
    assert written["vision_config"] == {"dtype": "bfloat16", "depth": 2}


def test_a_model_is_split_into_files_of_limited_size(hub, tmp_path):
    from transformers import AutoModelForCausalLM

    source = hub("llama")
    plan = plan_to_hf(source, tmp_path / "out", largest=20_000)
    target = _run(plan)
    weights = family_models.stored(source)
    index = json.loads((target / INDEX).read_text())
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    sizes = [sum(t.nbytes for t in load_file(target / f.name).values()) for f in plan.files]
    assert len(sizes) > 3
    assert max(sizes) <= 20_000
    model = AutoModelForCausalLM.from_pretrained(target)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert (
        _bytes(_run(plan_to_hf(target, tmp_path / "one")))["model.safetensors"]
        == (source / "model.safetensors").read_bytes()
    )


def test_no_move_is_larger_than_the_experts_of_a_layer(hub, tmp_path):
    plan = plan_from_hf(hub("qwen3_moe"), tmp_path / "out", ranks=2)
    experts = 4 * 2 * 24 * 32 * 4  # of them, gate and up, [24, 32] in float32
    assert (
        max(sum(spec.bytes for spec in move.outputs) for move in plan.moves if not move.is_copy)
        == experts
    )


def _padded(source, target, rows):
    """As a backend that pads the vocabulary writes it; config.json still has 97."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.cat([tensors[name], torch.full((rows - 97, 32), 7.0)])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_padding_rows_are_dropped_or_kept_as_requested(variant, hub, tmp_path):
    source = hub(variant)
    padded = _padded(source, tmp_path / "padded", 128)
    trimmed_plan, padded_plan = (
        plan_to_hf(padded, tmp_path / padding, padding=padding) for padding in ("drop", "keep")
    )
    assert _check(trimmed_plan).max_difference == 0.0
    assert (
        _bytes(trimmed_plan.target)["model.safetensors"]
        == (source / "model.safetensors").read_bytes()
    )
    assert _check(padded_plan).max_difference == 0.0
    assert json.loads((padded_plan.target / "config.json").read_text())["vocab_size"] == 128
    assert stored_tensors(padded_plan.target)["model.embed_tokens.weight"].spec.shape == (128, 32)


def test_too_few_rows_are_refused(hub, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(hub("llama"), short)
    tensors = load_file(short / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["lm_head.weight"][:90].clone()},
        short / "model.safetensors",
    )
    with pytest.raises(ModelError, match="90 rows"):
        plan_to_hf(short, tmp_path / "out")


def test_old_names_and_unknown_buffers_are_converted(hub, tmp_path):
    """The gpt2 of the Hub has no prefix, and obsolete buffers."""
    old = tmp_path / "old"
    shutil.copytree(hub("gpt2-tied"), old)
    tensors = {
        n.removeprefix("transformer."): t for n, t in load_file(old / "model.safetensors").items()
    }
    save_file(
        {**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)},
        old / "model.safetensors",
    )
    plan = plan_from_hf(old, tmp_path / "out", ranks=2)
    assert plan.notes == ("not a parameter of gpt2, kept as it is: h.0.attn.bias",)
    _check(plan)
    assert "transformer.wte.weight" in stored_tensors(plan.target)


def test_a_model_of_an_unknown_family_is_converted_unchanged(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("smollm3", **family_models.GQA))
    source = family_models.save(model, tmp_path / "source")
    plan = plan_from_hf(source, tmp_path / "sharded", ranks=2)
    assert "smollm3" in plan.notes[0]
    _check(plan)
    back = _run(plan_to_hf(plan.target, tmp_path / "back"))
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_lora_weights_are_refused(hub, tmp_path):
    folder = tmp_path / "lora"
    shutil.copytree(hub("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelError, match="LoRA"):
        plan_to_hf(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("500mb", 5 * 10**8), ("7", 7)]
)
def test_sizes_are_parsed(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-1GB", "0", "1e9"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(UsageError):
        parse_size(text)


def test_written_files_equal_those_of_the_safetensors_library(tmp_path):
    """Including unusual shapes and dtypes, an empty tensor, and a name that JSON escapes."""
    tensors = {
        'na"me ä': torch.arange(3),
        "a": torch.tensor(1.5, dtype=torch.float64),
        "b": torch.zeros(0, 4),
        "c": torch.ones(3, dtype=torch.bool),
        "d": torch.ones(5, dtype=torch.bfloat16),
        "e": torch.ones(1, dtype=torch.int8),
    }
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "nobody"}')
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    target = _run(plan_to_hf(source, tmp_path / "target"))
    assert (target / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    three = _run(plan_from_hf(source, tmp_path / "three", ranks=3))
    again = _run(plan_to_hf(three, tmp_path / "again"))
    actual = family_models.stored(again)
    assert actual.keys() == tensors.keys()
    assert all(torch.equal(actual[name], tensors[name]) for name in tensors)
