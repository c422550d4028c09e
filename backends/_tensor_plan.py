"""How the tensor-parallel plan that comes with a transformers model divides its modules."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from rlcli.api.value_model import value_head
from rlcli.errors import ModelError

from ._packable import is_norm


def styles_of(lm: Any, role: str, supported: Collection[str]) -> dict[str, str]:
    """Name of each module that the plan or rlcli covers → its style, one of those that are
    `supported`. Raises ModelError."""
    plan = _plan_of(lm)
    if not any(style.startswith("rowwise") for style in plan.values()):
        raise _cannot_split(lm, role, "transformers has no tensor-parallel plan for it")
    styles = planned_styles(lm)
    styles |= _at_the_ends(lm)
    styles |= _left_out(lm, styles)
    # such as those of experts
    of_modules = {_pattern_of(name) for name, _ in lm.named_modules()}
    of_parameters = {style for name, style in plan.items() if name not in of_modules}
    unknown = sorted((of_parameters | set(styles.values())) - set(supported))
    if unknown:
        raise _cannot_split(
            lm, role, f"its plan asks for {', '.join(unknown)}, which the backend does not know"
        )
    return styles


def planned_styles(lm: nn.Module) -> dict[str, str]:
    """Name of each module that the plan covers → its style there."""
    plan = _plan_of(lm)
    patterns = {name: _pattern_of(name) for name, _ in lm.named_modules()}
    return {name: plan[pattern] for name, pattern in patterns.items() if pattern in plan}


def _plan_of(lm: nn.Module) -> dict[str, str]:
    return getattr(lm, "tp_plan", None) or {}


def _pattern_of(name: str) -> str:
    """The name of a module as plans have it: a layer's number is a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _at_the_ends(lm: Any) -> dict[str, str]:
    """The styles of embedding and head."""
    names = {module: name for name, module in lm.named_modules()}
    styles = {names[lm.get_input_embeddings()]: "embedding"}
    if value_head(lm) is None:
        styles[names[lm.get_output_embeddings()]] = "head"
    return styles


def _left_out(lm: nn.Module, styles: dict[str, str]) -> dict[str, str]:
    """Styles of modules that a plan leaves out, though they compute with a rank's own columns or
    heads: activations that are trained, as in Apertus, and norms with a row for each head."""
    divided = {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}
    left_out: dict[str, str] = {}
    for name, module in lm.named_modules():
        if name in styles or name.rpartition(".")[0] not in divided:
            continue
        if type(module).__module__ == "transformers.activations":
            left_out[name] = "replicated_with_grad_allreduce"
        elif is_norm(module) and any(weight.dim() == 2 for weight in module.parameters()):
            left_out[name] = "heads"
    return left_out


def check_sizes(lm: Any, styles: dict[str, str], size: int, role: str) -> None:
    config = lm.config.get_text_config()
    keys = re.compile(r"k_proj|query_key_value")
    keeps_heads = any(style == "colwise" and keys.search(name) for name, style in styles.items())
    heads = {"attention heads": config.num_attention_heads}
    heads["key-value heads"] = (
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    for quantity, count in heads.items() if keeps_heads else ():
        if count % size:
            raise _cannot_split(
                lm, role, f"its {count} {quantity} cannot be divided among {size} ranks"
            )
    for name, style in styles.items():
        module = lm.get_submodule(name)
        widths = {"colwise_gather_output": "out_features", "rowwise_split_input": "in_features"}
        if style in widths and getattr(module, widths[style]) % size:
            raise _cannot_split(
                lm, role, f"the width of {name} cannot be divided among {size} ranks"
            )


def _cannot_split(lm: Any, role: str, reason: str) -> ModelError:
    hint = f"set models.{role}.mesh.tp=1, or use another size of tp or another model"
    return ModelError(
        f"the {lm.config.model_type} of role {role} cannot be tensor-parallel: {reason}", hint=hint
    )
