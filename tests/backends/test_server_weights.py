"""The client's copy of the weights has the dtype of the servers, so that no surplus bits are
written or sent."""

from types import SimpleNamespace

import pytest
import torch

from rlcli.backends._server_weights import WeightFolder, dtype_of
from rlcli.backends._sglang_group import _buckets
from rlcli.errors import ModelError
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import tiny_model


def stored_bytes(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def follow_model(weights, model, eta=1.0):
    source = HeldSource(model)
    blocks = [(block, source.read(block.name)) for block in weights.blocks()]
    weights.receive(SimpleNamespace(parameter_blocks=lambda: iter(blocks)), eta)()


@pytest.mark.parametrize(
    ("options", "stored", "dtype"),
    [
        ({}, None, torch.float32),
        ({}, torch.float32, torch.float32),
        ({}, torch.bfloat16, torch.bfloat16),
        ({"dtype": "auto"}, None, torch.float32),
        ({"dtype": "auto"}, torch.float16, torch.float16),
        ({"dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"dtype": "half"}, None, torch.float16),
        ({"dtype": "float32"}, torch.bfloat16, torch.float32),
    ],
)
def test_weights_have_the_dtype_of_the_servers(options, stored, dtype):
    assert dtype_of(options, SimpleNamespace(dtype=stored)) is dtype


def test_servers_in_bfloat16_are_sent_rounded_weights_of_half_the_size(tmp_path):
    wide = WeightFolder("actor", HeldSource(tiny_model("llama", seed=1)), tmp_path / "wide")
    narrow = WeightFolder(
        "actor", HeldSource(tiny_model("llama", seed=1)), tmp_path / "narrow", torch.bfloat16
    )
    new = tiny_model("llama", seed=2)
    for weights in (wide, narrow):
        follow_model(weights, new)
    sent = {
        name: one
        for names, tensors in _buckets(narrow.folder)
        for name, one in zip(names, tensors, strict=True)
    }
    assert {one.dtype for one in sent.values()} == {torch.bfloat16}
    numbers = sum(one.numel() for one in sent.values())
    # headers differ
    assert stored_bytes(wide.folder) - stored_bytes(narrow.folder) >= 2 * numbers - 4096
    for (name, narrow_one), (_, wide_one) in zip(
        narrow.parameters(), wide.parameters(), strict=True
    ):
        assert narrow_one.dtype == torch.float32
        assert torch.equal(narrow_one, wide_one.bfloat16().float()), name


def test_mixing_rounded_weights_is_refused(tmp_path):
    weights = WeightFolder(
        "actor", HeldSource(tiny_model("llama", seed=1)), tmp_path, torch.bfloat16
    )
    with pytest.raises(
        ModelError,
        match=r"follows with eta 0\.5, but keeps its weights in the servers' torch.bfloat16",
    ):
        follow_model(weights, tiny_model("llama", seed=2), 0.5)
