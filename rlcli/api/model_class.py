"""The class of transformers that a model is of."""

from __future__ import annotations

from typing import Any

from rlcli.api.value_model import CRITIC, value_model_class


def model_class(architectures: Any) -> Any:
    """The class that `architectures` of a config.json names first; None if transformers has none of
    that name."""
    import transformers

    name = architectures[0] if isinstance(architectures, list) and architectures else None
    named = getattr(transformers, str(name), None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return named if is_model else None


def class_of(config: Any) -> Any:
    """The class that a configuration names, or a critic's; a language model if it names none.
    Raises KeyError if transformers has no language model of its type, ValueError no critic."""
    import transformers

    if (named := model_class(config.architectures)) is not None:
        return named
    if str((config.architectures or [""])[0]).endswith(CRITIC):
        return value_model_class(config)
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]
