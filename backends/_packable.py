"""Which models of transformers, and which texts, are computed in packs of sequences: those of which
a sequence has the same numbers in any pack."""

from __future__ import annotations

import inspect
from typing import Any, TypeGuard

from torch import nn

from rlcli.api.value_model import value_head
from rlcli.errors import ModelError


def refuse_unpackable(lm: Any) -> None:
    """Raises ModelError for a model with layers in which packed sequences would see each other, or
    with another head than one matrix."""
    _refuse_other_layers(lm)
    _refuse_other_heads(lm)


def _refuse_other_layers(lm: Any) -> None:
    config = lm.config.get_text_config()
    others = sorted(
        set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    )
    if others:
        reason = f"layers of type {', '.join(others)}"
    elif getattr(lm, "_is_stateful", False):
        reason = "layers that carry a state from token to token"
    elif _attends_itself(lm.base_model):
        reason = "its own attention, which cannot be replaced"
    elif "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        reason = "positions that it counts itself"
    else:
        return
    raise cannot_be_packed(config.model_type, reason)


def _attends_itself(backbone: Any) -> bool:
    """Whether a layer would ignore the attention that is set. transformers searches the model's
    file for the call that asks for it, and may find that of a vision tower (GIT)."""
    of_layers = {
        type(module)
        for module in backbone.modules()
        if "Attention" in type(module).__name__ and hasattr(module, "layer_idx")
    }
    return not backbone._can_set_attn_implementation() or not all(
        map(_asks_for_attention, of_layers)
    )


def _asks_for_attention(layer: type[nn.Module]) -> bool:
    bases = layer.__mro__[: layer.__mro__.index(nn.Module)]
    return any("get_interface(" in inspect.getsource(base) for base in bases)


def _refuse_other_heads(lm: Any) -> None:
    """Scores are computed from the hidden states with the last matrix alone."""
    head = value_head(lm) or lm.get_output_embeddings()
    between = [child for child in lm.children() if child not in (lm.base_model, head)]
    if any(True for child in between for _ in child.parameters()) or (
        isinstance(head, nn.Linear) and not is_plain_linear(head)
    ):
        raise ModelError(
            f"{lm.config.model_type} does more to its hidden states than multiply them with one "
            "matrix: its log-probs cannot be computed",
            hint="use a model whose head is one matrix, such as llama, qwen3 or gemma3",
        )


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer that only multiplies: routers and heads may be linear layers
    that do more."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def cannot_be_packed(kind: str, reason: str) -> ModelError:
    return ModelError(
        f"{kind} has {reason}: its sequences cannot be packed",
        hint="use a model with full or sliding-window attention, such as llama, qwen3 or gemma3",
    )


def check_rotary(role: str, longest: int, config: Any) -> None:
    """Check that rotary embeddings are the same for all texts of up to `longest` tokens. Longer
    ones would change those of every other text in a pack, and of their own earlier tokens. Raises
    ModelError."""
    kind, limit = _changing_rotary(config.get_text_config())
    if limit is not None and longest > limit:
        raise ModelError(
            f"a text of role {role} may reach {longest} tokens; beyond {limit}, the {kind} "
            f"position embeddings of its {config.model_type} depend on the longest of the texts "
            "that are computed together",
            hint="lower generation.max_new_tokens or the dataset's max_length",
        )


def _changing_rotary(config: Any) -> tuple[str, int | None]:
    """The kind of rotary embeddings that depend on the length of texts, and the number of tokens
    from which they do; None: they never do."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in settings.values() if isinstance(value, dict)]
    for each in by_layer or [settings]:
        kind = each.get("rope_type", "default")
        if kind == "longrope":
            return kind, each["original_max_position_embeddings"]
        if kind == "dynamic":
            return kind, config.max_position_embeddings
    return "default", None
