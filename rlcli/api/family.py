"""Model families: how the configuration and parameters of, say, all Llamas translate between
Hugging Face and rlcli.

A family is one file, `rlcli/checkpoint/families/<model_type>.py`,
or `families/<model_type>.py` of a project:

    @register_hf_family("bloom")
    class Bloom(HFFamily):
        ...

Our parameter names are those below for every family; `{i}` counts blocks and `{e}` experts,
both from 0.

    embedding.tokens.weight                          [vocabulary, hidden]
    embedding.positions.weight                       [positions, hidden]
    layers.{i}.attention.norm.weight|bias            [hidden]
    layers.{i}.attention.q|k|v.weight|bias           [(kv_)heads * head_dim, hidden]
    layers.{i}.attention.q_norm|k_norm.weight        [head_dim]
    layers.{i}.attention.output.weight|bias          [hidden, heads * head_dim]
    layers.{i}.mlp.norm.weight|bias                  [hidden]
    layers.{i}.mlp.gate|up.weight|bias               [mlp, hidden]
    layers.{i}.mlp.down.weight|bias                  [hidden, mlp]
    layers.{i}.mlp.router.weight                     [experts, hidden]
    layers.{i}.mlp.experts.{e}.gate|up|down.weight   as gate, up, down, with the width of an expert
    layers.{i}.mlp.shared_expert.gate|up|down.weight likewise, with the width of the shared expert
    layers.{i}.mlp.shared_expert.router.weight       [1, hidden]
    head.norm.weight|bias                            [hidden]
    head.output.weight                               [vocabulary, hidden]; absent where tied
    head.value.weight|bias                           [1, hidden]
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, overload

from rlcli.api.parameters import Layout, Link
from rlcli.errors import ProjectError

HOME = "rlcli.checkpoint.families"
"""The package that the files of families are imported from."""

Form = Literal["file", "module"]
"""Hugging Face's names as `save_pretrained` writes them, or as those of the parameters of a
transformers module."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    base: float
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """`rope_type` and its settings, as Hugging Face writes them; empty for none."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    count: int
    per_token: int
    width: int
    """Width of an expert's hidden layer."""
    normalized: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    layers: tuple[int, ...]
    """Blocks that have experts; the others have an ordinary MLP."""
    shared: int = 0
    """Width of an expert that every token uses in addition, scaled by the sigmoid of a router of
    its own; 0: there is none."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything a forward pass needs to know about a decoder, in one form for all families."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the MLP's hidden layer."""
    vocabulary: int
    """Rows of the embedding."""
    positions: int
    """The longest sequence the model was made for."""
    tied: bool
    """Whether the output matrix is the embedding."""
    activation: str
    """silu, gelu, gelu_tanh, or relu."""
    norm_eps: float
    gated: bool = True
    """Whether the MLP multiplies the activated gate by up; otherwise, up is activated."""
    layer_norm: bool = False
    """Whether norms are LayerNorm with biases instead of RMSNorm."""
    norm_offset: float = 0.0
    """Added to a norm's weight."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    """Factor by which embeddings are multiplied."""
    rope: Rope | None = None
    """None: positions have their own embeddings."""
    windows: tuple[int | None, ...] = ()
    """Tokens that each block attends to; None for all. Empty: all, in every block."""
    scaled_by_head: bool = True
    """Whether attention scores are divided by the square root of head_dim."""
    scaled_by_layer: bool = False
    """Whether attention scores are divided by the number of the block, counted from 1."""
    experts: Experts | None = None
    value_head: bool = False
    """Whether the model outputs one number per token instead of logits."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """The other entries of config.json (token ids, dropout, and so on), under their own names."""


class HFFamily(abc.ABC):
    """Two config converters, two state-dict converters for any subset,
    three functions that name parameters.

    A family implements the first two and the three lists of links; the rest follows.
    """

    architecture: ClassVar[str]
    """The language model's class in transformers."""
    prefix: ClassVar[str] = "model."
    """Prefix of the parameter names of the model without its head."""

    @abc.abstractmethod
    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """The configuration from a config.json's content.
        Raises ModelError if the family cannot represent it."""

    @abc.abstractmethod
    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """The content of config.json, as transformers 5 writes it."""

    @abc.abstractmethod
    def embedding_links(self, config: ModelConfig) -> Iterable[Link]:
        """The parameters before the first block."""

    @abc.abstractmethod
    def block_links(self, config: ModelConfig, index: int, form: Form) -> Iterable[Link]:
        """The parameters of block `index`, counted from 0."""

    @abc.abstractmethod
    def head_links(self, config: ModelConfig) -> Iterable[Link]:
        """The parameters after the last block. An output matrix is listed even if tied:
        a file may hold it anyway."""

    def layout(self, config: ModelConfig, form: Form = "file") -> Layout:
        """All parameters of a model, in the order of the forward pass."""
        blocks = (
            link for index in range(config.layers) for link in self.block_links(config, index, form)
        )
        return Layout([*self.embedding_links(config), *blocks, *self.head_links(config)])

    def sd_from_hf(
        self, state_dict: Mapping[str, Any], config: ModelConfig, form: Form = "file"
    ) -> dict[str, Any]:
        """Our parameters for any subset of Hugging Face's."""
        return self.layout(config, form).to_ours(state_dict)

    def sd_to_hf(
        self, state_dict: Mapping[str, Any], config: ModelConfig, form: Form = "file"
    ) -> dict[str, Any]:
        """Hugging Face's parameters for any subset of ours that splits none of them."""
        return self.layout(config, form).to_theirs(state_dict)

    def embedding_param_names(self, config: ModelConfig) -> list[str]:
        """Hugging Face's names of the parameters before the first block."""
        return [link.theirs for link in self.embedding_links(config)]

    def tblock_param_names(self, config: ModelConfig, index: int) -> list[str]:
        """Hugging Face's names of the parameters of block `index`, counted from 0."""
        return [link.theirs for link in self.block_links(config, index, "file")]

    def head_param_names(self, config: ModelConfig) -> list[str]:
        """Hugging Face's names of parameters after the last block,
        except an output matrix that is the embedding."""
        links = self.head_links(config)
        return [
            link.theirs
            for link in links
            if not (config.tied and link.ours == ("head.output.weight",))
        ]


F = TypeVar("F", bound=type[HFFamily])

_FAMILIES: dict[str, type[HFFamily]] = {}


def registered_families() -> Mapping[str, type[HFFamily]]:
    """The families whose files were imported, by model_type."""
    return _FAMILIES


@overload
def register_hf_family(name: str, cls: F) -> F: ...
@overload
def register_hf_family(name: str) -> Callable[[F], F]: ...
def register_hf_family(name: str, cls: F | None = None) -> F | Callable[[F], F]:
    """Register a family under its `model_type`: `register_hf_family(name, cls)`,
    or as a decorator."""
    if cls is None:
        return lambda decorated: register_hf_family(name, decorated)
    home, expected = cls.__module__, name.replace("-", "_")
    if home.startswith(f"{HOME}.") and home.removeprefix(f"{HOME}.") != expected:
        raise ProjectError(
            f"{home} registers {name!r}, but {name!r} must be in families/{expected}.py"
        )
    taken = _FAMILIES.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (home, cls.__qualname__):
        raise ProjectError(f"two model families are named {name!r}: {taken.__module__} and {home}")
    _FAMILIES[name] = cls
    return cls
