"""Which tensors are made from which for models whose family nobody has written: the rules of
transformers say what its files hold in another form than its modules, such as experts one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcli.api.model_class import class_of
from rlcli.api.model_export import CODES, as_stored, groups_in_files
from rlcli.api.stored_weights import DTYPES
from rlcli.checkpoint.tensor_dtypes import Raw, raw_type
from rlcli.checkpoint.tensor_files import StoredTensor, TensorSpec
from rlcli.checkpoint.tensor_moves import Move, copy_of, only_type
from rlcli.errors import ModelError


def plan_library_moves(folder: Path, tensors: Mapping[str, StoredTensor]) -> list[Move]:
    """How the tensors become those of files. They stay as they are if they have the names of files,
    or if transformers does not know the model. Raises ModelError for a group of several types."""
    module = _module(folder)
    if module is None or not _has_names_of(module, tensors):
        return [copy_of(tensor, name) for name, tensor in tensors.items()]
    parameters = module.state_dict().keys()
    moves = [copy_of(tensor, name) for name, tensor in tensors.items() if name not in parameters]
    meta = {
        name: torch.empty(tensor.spec.shape, device="meta")
        for name, tensor in tensors.items()
        if name in parameters
    }
    for group in dict.fromkeys(groups_in_files(module, meta).values()):
        files = as_stored(module, {name: meta[name] for name in group})
        sources = tuple(tensors[name] for name in group)
        moves += _moves(sources, {name: tuple(file.shape) for name, file in files.items()}, module)
    return moves


def refuse_other_form(
    folder: Path, tensors: Mapping[str, StoredTensor], hf: Mapping[str, Any]
) -> None:
    """Raise ModelError if ranks would hold parameters that no file has under their names."""
    module = _module(folder)
    if module is None or _has_names_of(module, tensors):
        return
    family = hf.get("model_type")
    raise ModelError(
        f"the files of {family} hold weights in another form than its modules, and no family "
        f"{family} is registered that says how ranks share them",
        hint=f"write it: rlcli new family {family}; --ranks 1 copies the files as they are",
    )


def _module(folder: Path) -> Any:
    """The model that the folder's config.json describes, on the meta device; None if transformers
    does not know it."""
    from transformers import AutoConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange
    from transformers.utils import logging

    logging.set_verbosity_error()  # its reports are not for our users
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        with torch.device("meta"):
            module = class_of(config)._from_config(config)
    except Exception:  # whatever transformers raises for a model of somebody else
        return None
    rules = get_model_conversion_mapping(module, add_legacy=False)
    module._weight_conversions = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return module


def _has_names_of(module: Any, names: Collection[str]) -> bool:
    """Whether the tensors are those of the module, as a run keeps them, and not of its files."""
    return all(name in names for name, _ in module.named_parameters())


def _moves(
    sources: tuple[StoredTensor, ...], files: Mapping[str, tuple[int, ...]], module: Any
) -> list[Move]:
    """`files`: name → shape of what the sources become together."""
    if files.keys() == {source.spec.name for source in sources}:
        return [copy_of(source, source.spec.name) for source in sources]
    dtype = only_type(sources, min(files))
    outputs = tuple(TensorSpec(name, dtype, shape) for name, shape in files.items())
    return [Move(sources, outputs, rule=partial(_as_files, module))]


def _as_files(module: Any, ours: Mapping[str, tuple[str, Raw]]) -> dict[str, Raw]:
    weights = {
        name: torch.from_numpy(raw.view(f"<i{raw.dtype.itemsize}")).view(DTYPES[dtype])
        for name, (dtype, raw) in ours.items()
    }
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().view(raw_type(CODES[tensor.dtype]))
        for name, tensor in as_stored(module, weights).items()
    }
