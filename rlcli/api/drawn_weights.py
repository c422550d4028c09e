"""Random weights as the model's family draws them, block by block: any part of any parameter
without the rest.

A family's code initialises its parameters. That code runs once on the meta device, where it costs
nothing, and its operations on each parameter are recorded: a few that treat all numbers alike, such
as `normal_(0, 0.02)`. They are replayed later on the requested blocks of rows, each block with its
own random stream.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.api.config import stable_seed
from rlcli.api.model_skeleton import check_vocabulary, on_meta, skeleton, without_dropout
from rlcli.api.model_source import Head, ModelSource, Region, bounds, row_blocks
from rlcli.api.token_texts import id_count
from rlcli.api.value_model import value_parameters
from rlcli.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DRAWS: dict[str, Any] = {
    "normal_": torch.Tensor.normal_,
    "uniform_": torch.Tensor.uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
}
"""Operations that draw from a random stream."""
_SETS = (*_DRAWS, "fill_", "zero_")
"""Operations that overwrite all previous values."""
_CHANGES = (
    "erfinv_",
    "mul_",
    "add_",
    "sub_",
    "div_",
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "neg_",
    "exp_",
    "log_",
)
"""Operations that change each number independently."""
_CONSTANTS = {"ones": 1.0, "zeros": 0.0, "ones_like": 1.0, "zeros_like": 0.0}
"""Functions that make a tensor filled with one number."""


@dataclass(frozen=True)
class _Operation:
    name: str
    arguments: tuple[Any, ...]
    settings: Mapping[str, Any]
    row: int | None = None
    """The only row it applies to; None: all rows."""


@dataclass
class _Beginning:
    """How a parameter is initialised."""

    operations: list[_Operation] = field(default_factory=list)
    is_known: bool = True

    def note(self, operation: _Operation) -> None:
        if operation.row is None and operation.name in _SETS:
            self.operations.clear()
            self.is_known = True
        self.operations.append(operation)

    def draw(self, shape: tuple[int, ...], first: int, seed: int) -> torch.Tensor:
        """A block of rows that starts at row `first`."""
        block = torch.empty(shape)
        generator = torch.Generator().manual_seed(seed)
        for operation in self.operations:
            target = block
            if operation.row is not None:
                if not first <= operation.row < first + shape[0]:
                    continue
                target = block[operation.row - first]
            if operation.name in _DRAWS:
                _DRAWS[operation.name](
                    target, *operation.arguments, **operation.settings, generator=generator
                )
            else:
                getattr(target, operation.name)(*operation.arguments, **operation.settings)
        return block


class _Recorder(TorchDispatchMode):
    """Records operations on tensors on the meta device, by storage,
    because parameters are made from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._beginnings: dict[int, _Beginning] = {}
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._alive: list[Any] = []
        """Storages, kept alive so that no new one gets the address of an old one."""

    def beginning_of(self, tensor: torch.Tensor) -> _Beginning:
        return self._beginnings.get(tensor.untyped_storage()._cdata, _Beginning(is_known=False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in _CONSTANTS or name == "full":
            self._begin(result, _CONSTANTS[name] if name in _CONSTANTS else args[1])
        elif name.endswith("_") and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            self.note(name, args[0], tuple(args[1:]), dict(kwargs or {}))
        return result

    def _begin(self, tensor: torch.Tensor, value: Any) -> None:
        if tensor.is_meta:
            self.note("fill_", tensor, (value,), {})

    def note(
        self, name: str, tensor: torch.Tensor, arguments: tuple[Any, ...], settings: dict[str, Any]
    ) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._beginnings:
            self._beginnings[storage._cdata] = _Beginning(is_known=False)
            self._alive.append(storage)
        beginning = self._beginnings[storage._cdata]
        settings.pop("generator", None)
        is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        row = None if is_whole else _row_of(tensor, storage.nbytes())
        simple = not any(
            isinstance(value, torch.Tensor) for value in (*arguments, *settings.values())
        )
        if not simple or name not in _SETS + _CHANGES or (not is_whole and row is None):
            beginning.is_known = False
            return
        beginning.note(_Operation(name, arguments, settings, row))


def _row_of(view: torch.Tensor, nbytes: int) -> int | None:
    """The index of the row that a view of a matrix covers; None if it covers anything else."""
    size, offset = view.numel(), view.storage_offset()
    fits = (
        view.is_contiguous()
        and size > 0
        and offset % size == 0
        and nbytes % (size * view.element_size()) == 0
    )
    return offset // size if fits else None


def _recorded(config: Any, head: str) -> tuple[Any, _Recorder]:
    """A model on the meta device, and the record of its initialisation. Nothing is tied, so that a
    parameter from which a tied one takes its numbers has its own record."""
    from transformers import initialization

    recorder, apart = _Recorder(), copy.deepcopy(config)
    apart.tie_word_embeddings = False

    def trunc_normal_(
        tensor: torch.Tensor, generator: Any = None, **settings: float
    ) -> torch.Tensor:
        # torch itself does nothing on the meta device
        recorder.note("trunc_normal_", tensor, (), dict(settings))
        return tensor

    with (
        recorder,
        mock.patch.dict(initialization.TORCH_INIT_FUNCTIONS, trunc_normal_=trunc_normal_),
    ):
        lm = on_meta(apart, head, torch.float32)
        lm.initialize_weights()
    return lm, recorder


class DrawnSource(ModelSource):
    """Random weights for a transformers configuration; those of a parameter depend only on the seed
    and its name.

    A critic and a language model with the same seed have the same backbone,
    as its parameters have the same names.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        head: Head,
        tokenizer: PreTrainedTokenizerBase | None,
        seed: int,
    ) -> None:
        """Raises ModelError for settings that do not make a model,
        or one whose weights cannot be drawn in parts."""
        self.head = head
        self._seed = seed
        model_type = fields.get("model_type")
        if model_type is None:
            raise ModelError(
                "a model from scratch needs its model_type", hint="for example model_type: llama"
            )
        try:
            self.config = _configuration(fields, tokenizer)
            lm, recorder = _recorded(self.config, head)
        except Exception as error:  # whatever a configuration class raises for odd values
            raise ModelError(
                f"no {model_type} model can be made from these settings: {first_line(error)}"
            ) from error
        check_vocabulary(lm, tokenizer)
        self.dtype = self.config.dtype or torch.float32
        self._prefix = f"{lm.base_model_prefix}."
        self._shapes = {name: tuple(parameter.shape) for name, parameter in lm.named_parameters()}
        self._beginnings = {
            name: recorder.beginning_of(parameter) for name, parameter in lm.named_parameters()
        }
        for name in value_parameters(lm) if head == "value" else ():
            self._beginnings[name] = _Beginning([_Operation("zero_", (), {})])
        self._refuse_unknown(str(model_type))

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return skeleton(self.config, self.head, dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def blocks(self, name: str, region: Region = ()) -> Iterator[tuple[int, torch.Tensor]]:
        if name not in self._shapes:
            return  # a buffer: computed, not drawn
        shape, beginning = self._shapes[name] or (1,), self._beginnings[name]
        own_name = name.removeprefix(self._prefix)
        rows, *others = bounds(region, shape)
        for block in row_blocks(shape, rows):
            seed = stable_seed(self._seed, own_name, block.number)
            drawn = beginning.draw((block.size, *shape[1:]), block.first, seed)
            values = drawn[(block.selected, *others)]
            yield (
                block.first + block.selected.start - rows.start,
                values if self._shapes[name] else values[0],
            )

    def _refuse_unknown(self, model_type: str) -> None:
        unknown = sorted(
            name for name, beginning in self._beginnings.items() if not beginning.is_known
        )
        if unknown:
            raise ModelError(
                f"{model_type} has weights that cannot be drawn part by part, first {unknown[0]}",
                hint=(
                    "make the model once with transformers, save it with save_pretrained, and "
                    "give the folder as path"
                ),
            )


def _configuration(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Any:
    from transformers import AutoConfig

    settings = {key: value for key, value in fields.items() if key != "model_type"}
    if tokenizer is not None:
        settings = {
            "vocab_size": id_count(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **settings,
        }
    return without_dropout(AutoConfig.for_model(fields["model_type"], **settings))
