"""How the backends use transformers models: dtype of products,
attention over packed sequences, refusals."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlcli.api.value_model import value_head, value_model_class
from rlcli.backends._transformers import PackedModel
from rlcli.errors import ModelError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.samples import batch
from rlcli.testing.tiny_models import tiny_model

# -- windows and capped scores ---------------------------------------------------------------------

SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
LENGTHS = (3, 12, 1, 4, 5, 6, 11)


def packing_error(model_type, lengths, **settings):
    """The largest difference between logits of packed sequences and of each sequence alone in plain
    transformers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZE, **settings, attn_implementation="eager")
    plain, packed = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    for parameter in plain.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    packed.load_state_dict(plain.state_dict())
    tokens = torch.randint(3, 97, (sum(lengths),))
    with torch.no_grad():
        expected = torch.cat(
            [plain(input_ids=part[None]).logits[0] for part in tokens.split(lengths)]
        )
        actual = PackedModel(packed, torch.float32)(tokens, lengths, lambda output: output.logits)
    return float((actual - expected).abs().max())


@pytest.mark.parametrize("window", [1, 4, 5, 6, 11, 12, 13])
@pytest.mark.parametrize(("model_type", "settings"), [
    ("mistral", {}),
    ("mixtral", {"num_local_experts": 2}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}),
    ("gemma2", {"attn_logit_softcapping": 1.0}),
    ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 2, "num_experts": 4}),
    ("phimoe", {"num_local_experts": 2}),
    ("cohere2", {}),
    ("olmo3", {}),
    ("phi3", {}),
    ("starcoder2", {}),
    ("afmoe", {"layer_types": ["sliding_attention", "full_attention"] * 2,
               "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
])  # fmt: skip
def test_sliding_windows_match_transformers(model_type, settings, window):
    assert packing_error(model_type, LENGTHS, sliding_window=window, **settings) < 1e-5


UNSUPPORTED = {
    "gpt_oss": ({"num_local_experts": 4}, "GptOssAttention has attention sinks"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 2]]}, "its own attention"),
    "bloom": ({}, "its own attention"),
    "mpt": ({}, "its own attention"),
    "mamba": ({}, "linear_attention"),
    "llama4_text": ({"num_local_experts": 2, "intermediate_size_mlp": 64}, "chunked_attention"),
    "git": ({}, "its own attention"),
    "nemotron": ({}, "NemotronAttention has no way to know which tokens belong together"),
    "doge": ({}, "DogeAttention has masks that it makes itself"),
    "bart": (
        {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 4},
        "positions that it counts itself",
    ),
}
"""In a pack, their sequences would attend to each other, or not to everything that they should, or
have other positions."""


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_models_that_cannot_be_packed_are_refused_with_the_reason(model_type):
    settings, reason = UNSUPPORTED[model_type]
    with pytest.raises(ModelError, match=reason):
        packing_error(model_type, LENGTHS, **settings)


def test_a_model_that_computes_with_the_mask_of_a_window_is_refused():
    with pytest.raises(ModelError, match="masks that it makes itself"):
        packing_error("doge", LENGTHS, sliding_window=4)


@pytest.mark.parametrize(("model_type", "settings"), [
    ("granite", {"logits_scaling": 0.3}),
    ("hyperclovax", {"logits_scaling": 0.3}),
    ("cohere", {"logit_scale": 0.3}),
])  # fmt: skip
def test_logits_are_scaled_as_the_family_does(model_type, settings):
    """Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it."""
    assert packing_error(model_type, LENGTHS, **settings) < 1e-4


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "dory"])
def test_models_whose_head_is_more_than_a_matrix_are_refused(model_type):
    """One has layers before it, the other a scale for each logit."""
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZE))
    with pytest.raises(ModelError, match=f"{model_type} does more to its hidden states"):
        PackedModel(lm, torch.float32)


def test_critics_that_cannot_be_packed_are_refused_too():
    """Transformers has no critic of this family, so that its class is derived."""
    config = AutoConfig.for_model("gpt_neox_japanese", **SIZE, num_labels=1)
    with pytest.raises(ModelError, match="its own attention"):
        PackedModel(value_model_class(config)(config), torch.float32)


# -- critics ---------------------------------------------------------------------------------------


def test_the_cap_of_logits_is_not_applied_to_values():
    """Gemma 2 caps its logits at 5 here; values must exceed that."""
    critic = tiny_model("gemma2", head="value")
    with torch.no_grad():
        value_head(critic).bias.fill_(1000.0)
        values = PackedModel(critic, torch.float32)(
            torch.arange(3, 9), (4, 2), lambda output: output.values
        )
    assert values.shape == (6,)
    assert (values > 900).all()


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "gemma3_text", "cohere", "granite", "olmo2"]
)
def test_gradients_of_values_reach_every_parameter(family):
    critic = tiny_model(family, head="value")
    tokens, weights = torch.randint(3, 97, (16,)), torch.randn(16)
    PackedModel(critic, torch.float32)(
        tokens, (5, 11), lambda output: (output.values * weights).sum()
    ).backward()
    assert [
        name for name, p in critic.named_parameters() if p.grad is None or not p.grad.any()
    ] == []


# -- norms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_norms_with_a_row_for_each_head_do_not_decay(backend):
    """Cohere's norms of queries and keys are the only ones of more than one dimension."""
    subject = type("Subject", (BackendContract,), {"name": backend})()
    weights = {}
    for decay in (0.0, 0.5):
        lm = tiny_model("cohere", use_qk_norm=True)
        engine = subject.engine(None, lm=lm, **SETTINGS | {"weight_decay": decay})
        engine.train_batch(batch(), answer_loss, answer_weight)
        weights[decay] = subject.weights(engine)
    stays = {
        name for name, weight in weights[0.0].items() if torch.equal(weight, weights[0.5][name])
    }
    assert stays == {name for name in weights[0.0] if "norm" in name}
    assert any(weights[0.0][name].dim() > 1 for name in stays)
