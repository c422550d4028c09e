"""What Llama and its many relatives share: RMSNorm, rotary positions, separate q, k, v,
and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rlcli.api.family import Experts, Form, HFFamily, ModelConfig, Rope
from rlcli.api.parameters import Link
from rlcli.errors import ModelError

SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}
"""Field of ours → key of config.json."""

LARGEST = {
    "num_hidden_layers": 10_000,
    "n_layer": 10_000,
    "num_local_experts": 10_000,
    "num_experts": 10_000,
}
"""Limits on things that get a name each: an untrusted file must not fill our memory."""

WITH_VALUE_HEAD = "ForTokenClassification"
"""How the name of a class of transformers ends that has a value head."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

READ = frozenset(
    {
        *SIZES.values(),
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "rope_theta",
        "rope_scaling",
        "attention_bias",
        "mlp_bias",
        "architectures",
        "model_type",
    }
)
"""Keys that have a field of ours; all others are kept as they are."""


class Decoder(HFFamily):
    """Base of decoder families; subclasses define what is different about them."""

    defaults: ClassVar[Mapping[str, Any]]
    """What transformers assumes for a key that config.json lacks."""
    qk_norm: ClassVar[bool] = False
    norm_offset: ClassVar[float] = 0.0
    has_window: ClassVar[bool] = False
    """One attention window for all blocks, if `sliding_window` is set."""

    # -- configuration -----------------------------------------------------------------------------

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        settings = self._settings(hf)
        sizes: dict[str, Any] = {field: size_in(settings, key) for field, key in SIZES.items()}
        return ModelConfig(
            family=str(hf.get("model_type")),
            **sizes,
            kv_heads=size_in(settings, "num_key_value_heads", sizes["heads"]),
            head_dim=size_in(settings, "head_dim", sizes["hidden"] // sizes["heads"]),
            tied=bool(settings.get("tie_word_embeddings", False)),
            activation=self.activation(settings),
            norm_eps=float(settings["rms_norm_eps"]),
            norm_offset=self.norm_offset,
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias(settings),
            output_bias=self.output_bias(settings),
            mlp_bias=bool(settings.get("mlp_bias", False)),
            embedding_scale=self.embedding_scale(settings),
            rope=_rope(settings),
            windows=self.windows(settings),
            experts=self.experts(settings),
            value_head=has_value_head(hf),
            others={key: value for key, value in hf.items() if key not in READ},
        )

    def _settings(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """What config.json says, with the defaults of what it does not say."""
        settings = {**self.defaults}
        settings |= {key: value for key, value in hf.items() if value is not None}
        if self.has_window and "sliding_window" in hf:
            # null: no window; no such key: the usual one
            settings["sliding_window"] = hf["sliding_window"]
        return settings

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert config.rope is not None
        architecture = self.architecture
        if config.value_head:
            architecture = architecture.replace("ForCausalLM", WITH_VALUE_HEAD)
        hf: dict[str, Any] = {"model_type": config.family, **config.others}
        hf["architectures"] = [architecture]
        hf |= {key: getattr(config, field) for field, key in SIZES.items()}
        hf |= {
            "num_key_value_heads": config.kv_heads,
            "tie_word_embeddings": config.tied,
            "hidden_act": self.activation_to_hf(config),
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                **config.rope.scaling,
                "rope_theta": config.rope.base,
            },
        }
        if "head_dim" in self.defaults or config.head_dim * config.heads != config.hidden:
            hf["head_dim"] = config.head_dim
        if self.has_window:
            hf["sliding_window"] = next(iter(config.windows), None)
        if "attention_bias" in self.defaults:
            hf["attention_bias"] = config.qkv_bias
        if "mlp_bias" in self.defaults:
            hf["mlp_bias"] = config.mlp_bias
        return hf

    def activation(self, settings: Mapping[str, Any]) -> str:
        name = settings["hidden_act"]
        if name not in ACTIVATIONS:
            raise ModelError(
                f"a {settings.get('model_type')} model with hidden_act {name!r} is not supported"
            )
        return ACTIVATIONS[name]

    def activation_to_hf(self, config: ModelConfig) -> str:
        return {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation)

    def qkv_bias(self, settings: Mapping[str, Any]) -> bool:
        return bool(settings.get("attention_bias", False))

    def output_bias(self, settings: Mapping[str, Any]) -> bool:
        return bool(settings.get("attention_bias", False))

    def embedding_scale(self, settings: Mapping[str, Any]) -> float:
        return 1.0

    def windows(self, settings: Mapping[str, Any]) -> tuple[int | None, ...]:
        window = settings.get("sliding_window") if self.has_window else None
        return (window,) * size_in(settings, "num_hidden_layers") if window else ()

    def experts(self, settings: Mapping[str, Any]) -> Experts | None:
        return None

    # -- parameters --------------------------------------------------------------------------------

    def embedding_links(self, config: ModelConfig) -> Iterator[Link]:
        yield Link("model.embed_tokens.weight", ("embedding.tokens.weight",))

    def block_links(self, config: ModelConfig, index: int, form: Form) -> Iterator[Link]:
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        yield Link(f"{theirs}.input_layernorm.weight", (f"{ours}.attention.norm.weight",))
        yield from linear_links(f"{theirs}.self_attn.", f"{ours}.attention.", QKV, config.qkv_bias)
        yield from linear_links(
            f"{theirs}.self_attn.", f"{ours}.attention.", {"o_proj": "output"}, config.output_bias
        )
        if config.qk_norm:
            yield from linear_links(
                f"{theirs}.self_attn.", f"{ours}.attention.", QK_NORM, bias=False
            )
        yield Link(f"{theirs}.post_attention_layernorm.weight", (f"{ours}.mlp.norm.weight",))
        yield from self.mlp_links(config, index, form)

    def mlp_links(self, config: ModelConfig, index: int, form: Form) -> Iterator[Link]:
        yield from linear_links(
            f"model.layers.{index}.mlp.", f"layers.{index}.mlp.", MLP, config.mlp_bias
        )

    def head_links(self, config: ModelConfig) -> Iterator[Link]:
        yield Link("model.norm.weight", ("head.norm.weight",))
        if config.value_head:
            yield from linear_links("", "head.", {"score": "value"}, bias=True)
        else:
            yield from linear_links("", "head.", {"lm_head": "output"}, bias=False)


QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
QK_NORM = {"q_norm": "q_norm", "k_norm": "k_norm"}
MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def expert_links(
    config: ModelConfig, index: int, form: Form, theirs: str, names: Mapping[str, str]
) -> Iterator[Link]:
    """Router and experts of a block: a matrix per expert and use in files,
    stacked and fused in a module.

    `theirs` is the prefix of the names in files, `names` the file names of gate, up and down.
    """
    assert config.experts is not None
    ours, count = f"layers.{index}.mlp", config.experts.count
    module = f"model.layers.{index}.mlp"
    yield Link(f"{theirs if form == 'file' else module}.gate.weight", (f"{ours}.router.weight",))
    if form == "file":
        for expert in range(count):
            yield from linear_links(
                f"{theirs}.experts.{expert}.", f"{ours}.experts.{expert}.", names, bias=False
            )
        return
    each = [f"{ours}.experts.{expert}" for expert in range(count)]
    gates_and_ups = tuple(
        f"{expert}.{matrix}.weight" for expert in each for matrix in ("gate", "up")
    )
    width = config.experts.width
    yield Link(f"{module}.experts.gate_up_proj", gates_and_ups, rows=(width, width), experts=count)
    yield Link(
        f"{module}.experts.down_proj",
        tuple(f"{expert}.down.weight" for expert in each),
        experts=count,
    )


def linear_links(theirs: str, ours: str, names: Mapping[str, str], bias: bool) -> Iterator[Link]:
    """Matrices, and biases if there are any; `names` maps the last part of their names to ours."""
    for their_name, our_name in names.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            yield Link(f"{theirs}{their_name}.{kind}", (f"{ours}{our_name}.{kind}",))


def _rope(settings: Mapping[str, Any]) -> Rope:
    """Rotary positions, from the form that transformers 5 writes,
    or from `rope_theta` and `rope_scaling`."""
    scaling = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    base = scaling.pop(
        "rope_theta", settings.get("rope_theta", settings.get("default_theta", 10000.0))
    )
    kind = scaling.pop("type", None)  # its name before rope_type
    scaling = {"rope_type": kind or "default", **scaling}
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]  # the whole of each head, as without it
    if scaling["rope_type"] in ("llama3", "yarn", "longrope"):
        length = settings.get(
            "original_max_position_embeddings", settings["max_position_embeddings"]
        )
        is_own_key = "original_max_position_embeddings" in settings
        if is_own_key or "original_max_position_embeddings" not in scaling:
            scaling["original_max_position_embeddings"] = length  # as transformers prefers it
    return Rope(float(base), {} if scaling == {"rope_type": "default"} else scaling)


def has_value_head(hf: Mapping[str, Any]) -> bool:
    """Whether config.json names the class of a model with a value head."""
    return str((hf.get("architectures") or [""])[0]).endswith(WITH_VALUE_HEAD)


def size_in(settings: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    """A size in config.json. Raises ModelError if it is not a valid size or is absurdly large."""
    value = settings.get(key)
    value = otherwise if value is None else value
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not 1 <= value <= LARGEST.get(key, 2**40)
    ):
        raise ModelError(f"{key} in config.json is {value!r}, not a size")
    return value
