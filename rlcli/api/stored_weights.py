"""Weights from a folder of safetensors files, slice by slice,
under the names of the module's parameters.

Files may use other names, and store separately what the module has in one piece (the experts of a
block). transformers has rules for every family that translate between the two; they are applied to
one parameter at a time.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlcli.api.model_folder import model_folder
from rlcli.api.model_skeleton import (
    check_vocabulary,
    on_meta,
    skeleton,
    undescribed,
    without_dropout,
)
from rlcli.api.model_source import Head, ModelSource, Region, bounds, row_blocks
from rlcli.api.value_model import scorer_class, value_parameters
from rlcli.api.weight_files import PARTS, read_head, weight_files
from rlcli.api.weight_files import Head as FileHead
from rlcli.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Type in a safetensors header → type in torch."""


@dataclass(frozen=True)
class _Stored:
    file: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Made:
    """A parameter that one of transformers' converters makes from stored tensors."""

    converter: Any
    first: str
    """The first of the parameters that the converter makes; it identifies them by this one."""
    parts: tuple[tuple[str, _Stored], ...]
    """(the converter's pattern that matches the name, the tensor),
    in the order that the converter expects."""


class StoredSource(ModelSource):
    """The weights of a folder, or of a model on the Hub."""

    def __init__(self, origin: str, head: Head, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raises ModelError for a folder that is incomplete, unsafe, or does not hold the model
        that it describes."""
        self.head = head
        self._origin = origin
        self._folder = model_folder(origin, weights=True)
        heads = [read_head(file) for file in weight_files(self._folder)]
        self.dtype = _commonest_dtype(heads)
        stored = {
            name: _Stored(file_head.file, name, tuple(entry["shape"]))
            for file_head in heads
            for name, entry in file_head.tensors.items()
        }
        try:
            self.config = _configuration(self._folder)
            if head == "lm":
                _refuse_scorer(self.config, origin)
            lm = on_meta(self.config, head, torch.float32)
            if head == "value":
                stored = _under_own_head(lm, stored)
            sources, self._conversions = _assigned(lm, stored)
        except ModelError:
            raise
        except Exception as error:  # transformers and torch each have their own classes
            raise ModelError(
                f"the model in {origin} cannot be loaded: {first_line(error)}"
            ) from error
        check_vocabulary(lm, tokenizer)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
        self._model = lm
        """Converters read the shapes of its parameters."""
        self._opened: tuple[Path, Any] | None = None
        self._found = sources
        self._zeros = value_parameters(lm) - sources.keys() if head == "value" else set[str]()
        self.lacks_head = any(name.endswith(".weight") for name in self._zeros)
        self._join_tied(lm)
        self._refuse_other_shapes()
        self._refuse_missing(lm)
        self._warn_of_unused(lm, stored)

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from transformers import GenerationConfig

        lm: Any = skeleton(self.config, self.head, dtype)
        # to save under the names that were read
        lm._weight_conversions = copy.deepcopy(self._conversions)
        if (self._folder / "generation_config.json").is_file() and lm.can_generate():
            lm.generation_config = GenerationConfig.from_pretrained(
                self._folder, local_files_only=True
            )
        return lm

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def blocks(self, name: str, region: Region = ()) -> Iterator[tuple[int, torch.Tensor]]:
        shape, source = self._shapes[name], self._found.get(name)
        parts = bounds(region, shape)
        if name in self._zeros:
            yield 0, torch.zeros([span.stop - span.start for span in parts])
        elif isinstance(source, _Stored):
            yield from self._stored_blocks(source, parts)
        elif source is not None:
            yield from self._made_blocks(name, source, parts)

    # -- reading -----------------------------------------------------------------------------------

    def _stored_blocks(
        self, tensor: _Stored, region: Sequence[slice]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        opened = self._slice(tensor)
        if not tensor.shape:
            yield 0, opened[...]
            return
        rows, *others = region
        for block in row_blocks(tensor.shape, rows):
            start = block.first + block.selected.start
            yield (
                start - rows.start,
                opened[(slice(start, block.first + block.selected.stop), *others)],
            )

    def _made_blocks(
        self, name: str, rule: _Made, region: Sequence[slice]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """One expert at a time if the parameter is a stack of experts; otherwise all of it."""
        rows, *others = region
        if not _is_stack(rule):
            yield 0, self._converted(name, rule, rule.parts, self._shapes[name])[tuple(region)]
            return
        shape = (1, *self._shapes[name][1:])
        for row in range(rows.start, rows.stop):
            patterns = dict.fromkeys(pattern for pattern, _ in rule.parts)
            parts = [
                [source for source in rule.parts if source[0] == pattern][row]
                for pattern in patterns
            ]
            yield (
                row - rows.start,
                self._converted(name, rule, parts, shape)[(slice(None), *others)],
            )

    def _converted(
        self, name: str, rule: _Made, parts: Sequence[tuple[str, _Stored]], shape: tuple[int, ...]
    ) -> torch.Tensor:
        converter = copy.deepcopy(rule.converter)
        for pattern, tensor in parts:
            converter.add_tensor(rule.first, tensor.name, pattern, self._slice(tensor)[...])
        try:
            result = converter.convert(rule.first, model=self._model, config=self.config)[name]
        except Exception as error:  # whatever a conversion raises for tensors that do not fit
            raise self._unreadable(f"{name}: {first_line(error)}") from error
        weight: torch.Tensor = result[0] if isinstance(result, list) else result
        if tuple(weight.shape) != shape:
            raise self._unreadable(
                f"{name} has shape {list(weight.shape)} in the files, "
                f"but {list(shape)} according to config.json"
            )
        return weight

    def _slice(self, tensor: _Stored) -> Any:
        """A slice of the tensor. Only the file that was read last is kept open."""
        from safetensors import SafetensorError, safe_open

        try:
            if self._opened is None or self._opened[0] != tensor.file:
                # `pread` reads only what is requested; `mmap` maps whole pages, which count as this
                # process's memory.
                self._opened = (
                    tensor.file,
                    safe_open(str(tensor.file), framework="pt", backend="pread"),
                )
            return self._opened[1].get_slice(tensor.name)
        except (SafetensorError, OSError) as error:
            raise self._unreadable(first_line(error)) from error

    # -- tied and missing parameters ---------------------------------------------------------------

    def _join_tied(self, lm: Any) -> None:
        """A parameter that is tied to another may be stored under either name, or under both."""
        for target, origin in lm.all_tied_weights_keys.items():
            if target in self._found and origin in self._found:
                if not self._are_equal(target, origin):
                    # config.json says they are tied; the files differ
                    self.config.tie_word_embeddings = False
                    continue
            elif target in self._found or origin in self._found:
                source = self._found.get(origin) or self._found[target]
                self._found |= {target: source, origin: source}

    def _are_equal(self, first: str, second: str) -> bool:
        pairs = zip(self.blocks(first), self.blocks(second), strict=True)
        return self._shapes[first] == self._shapes[second] and all(
            torch.equal(a, b) for (_, a), (_, b) in pairs
        )

    def _refuse_other_shapes(self) -> None:
        for name, source in self._found.items():
            if isinstance(source, _Stored) and source.shape != self._shapes[name]:
                if source.file.match(PARTS):
                    message = f"{self._origin} holds a model in parts, one for each rank of a run"
                    hint = f"join them: rlcli convert {self._origin} --to-hf DIR"
                    raise ModelError(message, hint=hint)
                shapes = (
                    f"{list(source.shape)} in the files, "
                    f"but {list(self._shapes[name])} according to config.json"
                )
                raise self._unreadable(f"{name} has shape {shapes}")

    def _refuse_missing(self, lm: Any) -> None:
        ignored = [re.compile(pattern) for pattern in lm._keys_to_ignore_on_load_missing or ()]
        missing = {name for name, _ in lm.named_parameters()} - self._found.keys() - self._zeros
        missing = {name for name in missing if not any(pattern.search(name) for pattern in ignored)}
        if missing:
            raise ModelError(
                (
                    f"the weights in {self._origin} lack {len(missing)} tensors that the model "
                    f"needs, first {min(missing)}"
                ),
                hint="the folder may be incomplete, or its config.json may belong to another model",
            )

    def _warn_of_unused(self, lm: Any, stored: Mapping[str, _Stored]) -> None:
        used = {tensor.name for source in self._found.values() for tensor in _tensors_of(source)}
        if unused := undescribed(lm, stored.keys() - used):
            log.warning(
                "%s holds %d tensors for which its config.json leaves no place, first %s: "
                "they are not used, and the model may not be the one that was trained",
                self._origin,
                len(unused),
                min(unused),
            )

    def _unreadable(self, why: str) -> ModelError:
        return ModelError(f"the model in {self._origin} cannot be loaded: {why}")


def _configuration(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"the weights in {folder} are quantized",
            hint="use the model from before quantization",
        )
    return without_dropout(config)


def _refuse_scorer(config: Any, origin: str) -> None:
    """With tied embeddings it would have a head that was never trained to write."""
    if name := scorer_class(config):
        raise ModelError(
            f"the model in {origin} is a {name}, which gives numbers and writes no text",
            hint="it serves as a critic or reward model; name a language model here",
        )


def _commonest_dtype(heads: Sequence[FileHead]) -> torch.dtype:
    """The floating-point dtype that most of the bytes have."""
    totals: dict[torch.dtype, int] = {}
    for head in heads:
        for entry in head.tensors.values():
            dtype = DTYPES.get(entry["dtype"])
            if dtype is not None and dtype.is_floating_point:
                begin, end = entry["data_offsets"]
                totals[dtype] = totals.get(dtype, 0) + end - begin
    return max(totals, key=lambda dtype: totals[dtype], default=torch.float32)


def _under_own_head(lm: Any, stored: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """The tensors of a critic. transformers calls the head of a reward model
    (`ForSequenceClassification`) `score`; the critics of some families have another name for it."""
    head_names = value_parameters(lm)
    if head_names & stored.keys():
        return dict(stored)
    renamed = {f"score.{name.rpartition('.')[2]}": name for name in head_names}
    return {renamed.get(name, name): tensor for name, tensor in stored.items()}


def _assigned(
    lm: Any, stored: Mapping[str, _Stored]
) -> tuple[dict[str, _Stored | _Made], list[Any]]:
    """Parameter or buffer → what it is read from; and the transformers rules that were used."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    expected = set(lm.state_dict())
    rules = get_model_conversion_mapping(lm)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    sources: dict[str, _Stored | _Made] = {}
    groups: dict[str, tuple[Any, list[tuple[str, _Stored]]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        new, pattern, converter = _renamed(name, renamings, converters)
        new = _with_prefix(new, lm.base_model_prefix, expected)
        if new not in expected:
            plain = _with_prefix(name, lm.base_model_prefix, expected)
            new, pattern, converter = (
                (plain, None, None) if plain in expected else (new, pattern, converter)
            )
        if new in expected and converter is None:
            sources.setdefault(new, stored[name])
        elif new in expected:
            groups.setdefault(new, (converter, []))[1].append((str(pattern), stored[name]))
    for first, (converter, parts) in groups.items():
        rule = _Made(converter, first, tuple(parts))
        start = converter.target_patterns[0]
        sources |= {first.replace(start, target): rule for target in converter.target_patterns}
    return sources, [rule for rule in rules if rule.was_used()]


def _renamed(
    name: str, renamings: Sequence[Any], converters: Sequence[Any]
) -> tuple[str, str | None, Any]:
    """The name after all renamings and at most one converter,
    with that converter's pattern and the converter."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    for converter in converters:
        new, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return new, pattern, converter
    return name, None, None


def _with_prefix(name: str, prefix: str, expected: set[str]) -> str:
    """The name with its prefix added or removed, as a model may have been saved without its head or
    with one."""
    bare = name.removeprefix(f"{prefix}.")
    return next(
        (
            candidate
            for candidate in (bare, f"{prefix}.{name}")
            if candidate in expected and candidate != name
        ),
        name,
    )


def _tensors_of(source: _Stored | _Made) -> list[_Stored]:
    if isinstance(source, _Stored):
        return [source]
    return [tensor for _, tensor in source.parts]


def _is_stack(rule: _Made) -> bool:
    """Whether the parameter is a stack whose rows (experts)
    are stored separately and are never mixed."""
    from transformers.core_model_loading import MergeModulelist

    first, *others = rule.converter.operations
    dims = [
        getattr(op, key) for op in others for key in ("dim", "dim0", "dim1") if hasattr(op, key)
    ]
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and bool(others == [] or (dims and 0 not in dims))
    )
