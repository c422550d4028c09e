"""Models with one number per token instead of logits: critics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

CRITIC = "ForTokenClassification"
"""Suffix of the names of such classes."""
SCORERS = (CRITIC, "ForSequenceClassification")
"""Suffixes of the names of classes that give numbers instead of logits."""


def scorer_class(config: Any) -> str | None:
    """The class of a model that was saved as one which gives numbers; None for any other."""
    names = filter(None, getattr(config, "architectures", None) or ())
    return next((name for name in names if name.endswith(SCORERS)), None)


def value_model_class(config: Any) -> type[nn.Module]:
    """The class of critics for a transformers configuration.

    That is transformers' own token-classification model. For families without one, it is built from
    its parts: the family's backbone and a linear head, under the name that transformers would give
    it. Raises ValueError for a configuration that is not a language model's.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
    from transformers.modeling_layers import GenericForTokenClassification

    classes = AutoModelForTokenClassification._model_mapping
    if type(config) in classes:
        return classes[type(config)]
    language_models = AutoModelForCausalLM._model_mapping
    if type(config) not in language_models:
        raise ValueError(f"{config.model_type} is not a language model that transformers knows")
    lm = language_models[type(config)]
    family = next(base for base in lm.__mro__ if PreTrainedModel in base.__bases__)
    name = type(config).__name__.removesuffix("Config") + CRITIC
    traits = {
        "base_model_prefix": family.base_model_prefix,
        "config_class": type(config),
        # transformers reads its source to see how experts may be computed
        "__module__": family.__module__,
    }
    critic = type(name, (GenericForTokenClassification, family), traits)
    AutoModelForTokenClassification.register(type(config), critic)
    return critic


def value_head(model: nn.Module) -> nn.Linear | None:
    """The layer that gives a number per token, whatever its family calls it;
    None for a language model."""
    located = _value_head(model)
    return located[1] if located else None


def value_parameters(model: nn.Module) -> set[str]:
    """The names of the value head's parameters. Raises ModelError for a model without one."""
    located = _value_head(model)
    if located is None:
        raise ModelError(f"{type(model).__name__} has no value head that rlcli knows how to use")
    name, head = located
    return {f"{name}.{parameter}" for parameter, _ in head.named_parameters()}


def _value_head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The value head and its name: the one layer next to the backbone that has one output."""
    from torch import nn

    for name, child in model.named_children():
        if (
            child is not model.base_model
            and isinstance(child, nn.Linear)
            and child.out_features == 1
        ):
            return name, child
    return None
