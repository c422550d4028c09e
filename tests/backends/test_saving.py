"""A model is saved by one of several ranks; an error there is raised on all of them at once."""

import errno
import json
import time

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from rlcli.api.model_skeleton import skeleton
from rlcli.backends._saving import LONGEST, SavingRanks, _written_aside, describe
from rlcli.checkpoint.huggingface import load_tokenizer
from rlcli.errors import ModelError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.samples import batch
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer


class Checks(BackendContract):
    name = "fsdp"


def failure_of(save) -> tuple[str, str, int | None, float]:
    began = time.monotonic()
    try:
        save()
    except (ModelError, OSError) as error:
        return (
            type(error).__name__,
            str(error),
            getattr(error, "errno", None),
            time.monotonic() - began,
        )
    return "none", "", None, time.monotonic() - began


def test_an_error_of_the_writing_rank_is_raised_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(rank):
        engine = Checks().engine("llama", mesh=mesh_of_ranks(dp=2))
        no_folder = failure_of(lambda: engine.save_to_hf(None, str(tmp_path / "file" / "model")))
        engine.save_dtype = torch.float16
        with torch.no_grad():
            for name, parameter in engine.lm.named_parameters():
                if "layers.1.mlp" in name:
                    parameter.mul_(1e8)
        too_large = failure_of(lambda: engine.save_to_hf(None, str(tmp_path / "large")))
        engine.save_dtype = torch.float32
        fine = failure_of(lambda: engine.save_to_hf(None, str(tmp_path / "fine")))
        return {
            "no folder": no_folder,
            "too large": too_large,
            "fine": fine,
            "there": (tmp_path / "fine").is_dir(),
        }

    ranks = run_on_ranks(2, work)
    for seen in ranks:
        kind, message, number, _ = seen["no folder"]
        assert (kind, number) == ("NotADirectoryError", errno.ENOTDIR), message
        kind, message, _, _ = seen["too large"]
        assert kind == "ModelError"
        assert "layers.1.mlp" in message
        assert "too large for float16" in message
        assert (seen["fine"][0], seen["there"]) == ("none", True)
        assert max(seconds for *_, seconds in (seen["no folder"], seen["too large"])) < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "fine"]


def test_a_long_error_is_cut_for_other_ranks():
    ranks = SavingRanks(leads=True, groups=(), device=torch.device("cpu"))
    assert ranks.hear() == ""
    assert ranks.hear("x" * (LONGEST + 1)) == "x" * LONGEST
    assert ranks.hear("é" * LONGEST) == "é" * (LONGEST // 2)


def test_an_error_is_heard_along_every_dimension_of_a_mesh():
    def work(rank):
        mesh = mesh_of_ranks(dp=2, tp=2)
        groups = [mesh[dimension].get_group() for dimension in ("dp", "tp")]
        ranks = SavingRanks(leads=rank == 0, groups=groups, device=torch.device("cpu"))
        return ranks.hear("0 the disk is full" if ranks.leads else "")

    assert run_on_ranks(4, work) == ["0 the disk is full"] * 4


def test_a_folder_replaces_that_of_the_same_name(tmp_path):
    for text in ("first", "second"):
        with _written_aside(tmp_path / "actor") as folder:
            (folder / text).write_text(text)
    assert [path.name for path in (tmp_path / "actor").iterdir()] == ["second"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    killed = _written_aside(tmp_path / "actor")
    (killed.__enter__() / "model.safetensors").write_text("half")
    with _written_aside(tmp_path / "actor") as folder:
        assert list(folder.iterdir()) == []
        (folder / "config.json").write_text("{}")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "actor",
        "actor/config.json",
    ]


def described(settings, folder):
    """The generation settings that are saved of a model whose folder has these."""
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(settings))
    lm, tokenizer = tiny_model(), as_transformers(byte_tokenizer(chat=True))
    lm.generation_config = GenerationConfig.from_pretrained(folder)
    describe(lm, torch.float32, tokenizer, str(folder))
    return json.loads((folder / "generation_config.json").read_text()), tokenizer.eos_token_id


def test_generation_settings_that_transformers_finds_inconsistent_are_saved(tmp_path):
    settings = {"temperature": 0.9, "top_p": 0.6, "max_length": 4096}  # no do_sample
    saved, _ = described(settings, tmp_path / "model")
    assert saved.items() >= settings.items()
    assert saved["pad_token_id"] == as_transformers(byte_tokenizer(chat=True)).pad_token_id


@pytest.mark.parametrize(
    ("ends", "further"), [([201, 202], [201, 202]), ([202], [202]), (202, None), (None, None)]
)
def test_a_model_keeps_its_further_end_tokens(ends, further, tmp_path):
    saved, end = described({"eos_token_id": ends}, tmp_path / "several")
    assert saved["eos_token_id"] == ([end, *further] if further else end)
    if further:
        saved, _ = described({"eos_token_id": [*further, end]}, tmp_path / "among them")
        assert saved["eos_token_id"] == [end, *further]


def test_all_parts_of_a_configuration_have_the_dtype_of_the_files(tmp_path):
    text = {"vocab_size": 97, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text)
    lm = skeleton(config, "lm", torch.float32)
    configuration = lm.config.to_dict()
    describe(lm, torch.bfloat16, None, str(tmp_path))
    assert lm.config.to_dict() == configuration
    saved = json.loads((tmp_path / "config.json").read_text())
    parts = (saved, saved["text_config"], saved["vision_config"])
    assert [part["dtype"] for part in parts] == ["bfloat16"] * 3


def test_a_tokenizer_is_saved_without_the_arguments_that_it_was_loaded_with(tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    as_transformers(byte_tokenizer(chat=True)).save_pretrained(first)
    (first / "config.json").write_text('{"model_type": "llama"}')
    load_tokenizer(str(first)).save_pretrained(again)
    name = "tokenizer_config.json"
    assert json.loads((again / name).read_text()) == json.loads((first / name).read_text())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parameters_without_a_gradient_have_moments_in_a_state(optimizer):
    """Such as those for images of a model that is trained on texts: else its state would not fill
    an engine that has not been trained yet."""
    lm = tiny_model("llama")
    lm.model.register_parameter("of_images", torch.nn.Parameter(torch.ones(3)))
    trained, fresh = (Checks().engine(lm=lm, optimizer=optimizer) for _ in range(2))
    trained.train_batch(batch(), answer_loss, answer_weight)
    assert trained.state().optimizer.keys() == fresh.state(room_for_optimizer=True).optimizer.keys()
