"""The moves of a whole model to another form: by the family of its `model_type` or, where nobody
has written one, by what transformers says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcli.api.family import Form, HFFamily, ModelConfig
from rlcli.checkpoint.families import family_of
from rlcli.checkpoint.tensor_files import StoredTensor
from rlcli.checkpoint.tensor_moves import (
    Move,
    copy_of,
    plan_moves,
    rows_of_vocabulary,
    stays_wide,
    strangers,
    with_vocabulary,
)
from rlcli.errors import ModelError

MOST_EXPERTS = 4096
"""Maximum number of experts in a block; the largest models have a few hundred."""

Padding = Literal["drop", "keep"]
"""What happens to rows of the embedding beyond the vocabulary of config.json."""


def _no_tensor(dtype: str) -> Callable[[str], object]:
    return lambda name: False


@dataclass(frozen=True)
class MovePlan:
    """What becomes of each tensor of a model, and what else follows from that."""

    moves: list[Move]
    notes: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json."""
    stays_wide: Callable[[str], Callable[[str], object]] = _no_tensor
    """dtype → whether a tensor keeps its own in a model of that type, by its name."""


def plan_by_model_type(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    hf: Mapping[str, Any],
    form: Form,
    padding: Padding = "drop",
    ranks: int = 1,
) -> MovePlan:
    """The plan for the tensors of a folder whose config.json is `hf`. Raises ModelError, also if
    nothing says how several `ranks` share them."""
    family = family_of(hf.get("model_type"))
    if family is not None:
        return _by_family(family, tensors, hf, form, padding)
    return _by_library(folder, tensors, hf, form, ranks)


def _by_library(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    hf: Mapping[str, Any],
    form: Form,
    ranks: int,
) -> MovePlan:
    moves = [copy_of(tensor, name) for name, tensor in tensors.items()]
    if form == "file" or ranks > 1:
        from rlcli.checkpoint import library_moves  # loads torch

        if form == "file":
            moves = library_moves.plan_library_moves(folder, tensors)
        else:
            library_moves.refuse_other_form(folder, tensors, hf)
    note = f"no family {hf.get('model_type')} is registered: names are those of transformers"
    return MovePlan(moves, (note,), stays_wide=lambda dtype: stays_wide(hf, dtype))


def _by_family(
    family: HFFamily,
    tensors: Mapping[str, StoredTensor],
    hf: Mapping[str, Any],
    form: Form,
    padding: Padding,
) -> MovePlan:
    config = _config_of(family, hf)
    _refuse_absurd(config, len(tensors))
    notes = _notes_on(strangers(tensors, family, config), config)
    moves = plan_moves(tensors, family, config, form)
    rows = rows_of_vocabulary(moves, family, config, form)
    if padding == "keep" and rows is not None and rows > config.vocabulary:
        return MovePlan(moves, notes, {"vocab_size": rows})
    return MovePlan(with_vocabulary(moves, family, config, form), notes)


def _config_of(family: HFFamily, hf: Mapping[str, Any]) -> ModelConfig:
    try:
        return family.config_from_hf(hf)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"config.json is not valid: {type(error).__name__}: {error}") from error


def _notes_on(odd: list[str], config: ModelConfig) -> tuple[str, ...]:
    """A note on tensors that the family does not know, if there are any. Raises ModelError for
    those of LoRA."""
    if any("lora_" in name for name in odd):
        raise ModelError(
            f"the folder holds LoRA weights, such as {odd[0]}, which would be lost",
            hint="merge them into the model first",
        )
    shown = f"{', '.join(odd[:3])}{', …' if len(odd) > 3 else ''}"
    return (f"not a parameter of {config.family}, kept as it is: {shown}",) if odd else ()


def _refuse_absurd(config: ModelConfig, tensors: int) -> None:
    """A configuration is an untrusted file; its counts must not fill our memory with names."""
    if config.layers > tensors or (
        config.experts is not None and config.experts.count > MOST_EXPERTS
    ):
        experts = f" of {config.experts.count} experts" if config.experts is not None else ""
        raise ModelError(
            (
                f"config.json describes {config.layers} layers{experts}, the folder "
                f"holds {tensors} tensors"
            ),
            hint="the folder may be incomplete, or its config.json of another model",
        )
