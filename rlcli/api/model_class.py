"""The class of transformers that a model is of."""

from __future__ import annotations

from typing import Any


def model_class(architectures: Any) -> Any:
    """The class that `architectures` of a config.json names first; None if transformers has none of
    that name."""
    import transformers

    name = architectures[0] if isinstance(architectures, list) and architectures else None
    named = getattr(transformers, str(name), None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return named if is_model else None
