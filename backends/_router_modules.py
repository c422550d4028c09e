"""Where the routers of a transformers model are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rlcli.errors import ModelError


def routers_in(lm: Any, role: str, purpose: str, hint: str) -> tuple[Mapping[str, nn.Module], int]:
    """The routers of a model by name, layer by layer, and the index of the logits among their
    outputs. Raises ModelError for a model without routers of a known kind; `purpose` says what they
    are needed for, such as `balanced`."""
    config = lm.config.get_text_config()
    recorder: Any = (getattr(lm.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    modules: dict[str, nn.Module] = {}
    # the models to whose loss transformers itself can add that of routers
    if recorder is not None and hasattr(config, "router_aux_loss_coef"):
        modules = {
            name: module
            for name, module in lm.base_model.named_modules()
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
        }
    if not modules:
        raise ModelError(
            f"the {config.model_type} of role {role} has no routers that can be {purpose}",
            hint=hint,
        )
    return modules, recorder.index
