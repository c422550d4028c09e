"""Model folders of strangers: what their files may be, without reading any weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from rlcli.api.model_folder import check_config, check_folder, check_sizes
from rlcli.errors import ModelError
from rlcli.files import LFS_POINTER


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/rag.jinja"]
)
def test_a_link_to_a_file_of_this_machine_is_no_file_of_a_model(folder, tmp_path, name):
    (tmp_path / "private").write_text('{"auths": "canary"}')
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / "private")
    with pytest.raises(ModelError, match="is a link out of its folder") as raised:
        check_folder(folder, weights=False)
    assert raised.value.code == "S7"
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "tokenizer.json")
    check_folder(folder, weights=False)


def test_layers_may_differ_in_size():
    """Those of Gemma 3n have a list of widths; each is checked."""
    check_config({"text_config": {"intermediate_size": [64, 32]}}, "config.json")
    for odd in ([64, 1 << 40], [64, "big"], [[64]]):
        with pytest.raises(ModelError, match="intermediate_size is"):
            check_config({"intermediate_size": odd}, "config.json")
    with pytest.raises(ModelError, match="vocab_size is"):
        check_config({"vocab_size": [64, 32]}, "config.json")


@pytest.mark.parametrize("inner", [0.5, "llama", ["llama"]])
def test_an_inner_configuration_that_is_none_is_left_to_transformers(folder, inner):
    (folder / "config.json").write_text(json.dumps({"text_config": inner}))
    check_folder(folder, weights=True)
    check_sizes(folder, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_reported_as_a_file_that_was_not_fetched(folder, name):
    (folder / name).write_bytes(LFS_POINTER + b"\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ModelError, match=f"{name}: a pointer of Git LFS") as raised:
        check_folder(folder, weights=True)
    assert "git lfs pull" in raised.value.hint


def test_a_pointer_to_weights_is_of_no_interest_to_who_reads_the_tokenizer(folder):
    (folder / "model.safetensors").write_bytes(LFS_POINTER + b"\n")
    check_folder(folder, weights=False)


def test_without_any_weights_the_hint_is_to_fetch_them(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors weights") as raised:
        check_folder(folder, weights=True)
    assert "incomplete" in raised.value.hint
