"""The client's copy of the weights that servers generate with: a folder that transformers and
SGLang can read.

New weights are written completely, next to those in use, before any server is updated, and the old
ones are removed when all servers have the new ones. So responses pause only while servers load, an
update that fails midway leaves the old ones intact, and a server that has died can be given the
current ones again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcli.api.model import GivesParameters, ModelSource
from rlcli.api.model_export import own_weights
from rlcli.api.model_source import fill_tensor, open_source
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import ModelError
from rlcli.files import make_folder

from ._saving import SavingRanks, describe, save_model

Shapes = Mapping[str, tuple[int, ...]]
DTYPES = {
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
    "float16": torch.float16,
    "float": torch.float32,
    "float32": torch.float32,
}
"""SGLang's words for `dtype`, except auto, which is that of the model's configuration."""


def dtype_of(options: Mapping[str, Any], configuration: Any) -> torch.dtype:
    """What servers with these options hold of a model with this configuration: anything wider would
    be rounded when it arrives. SGLang holds a model of float32 in fewer bits unless told otherwise;
    it still gets all of them."""
    stored = getattr(configuration, "dtype", None)
    usual = stored if stored in (torch.bfloat16, torch.float16) else torch.float32
    return DTYPES.get(str(options.get("dtype")), usual)


class WeightFolder:
    """The weights in the dtype of the servers, under the names that the model's files use."""

    def __init__(
        self, role: str, source: ModelSource, root: Path, dtype: torch.dtype = torch.float32
    ):
        """Starts with the weights of `source`, in a folder below `root`."""
        make_folder(root)
        self._dtype = dtype
        self.number = 0
        """How many times the weights have been replaced."""
        self.model: Any = source.skeleton()
        """The model, without memory for its parameters."""
        self._role = role
        self._root = root
        self._parameters: Shapes = {
            name: tuple(one.shape) for name, one in self.model.named_parameters()
        }
        self._names = list(own_weights(self.model))
        for name in set(self._names) - set(self._parameters):
            fill_tensor(self.model.get_buffer(name), source, name)
        parameters = ((name, source.read(name)) for name in self._parameters)
        self._source = self._saved(parameters, self.folder)
        self.configuration = root / "configuration"
        """A folder that never changes: the model without its weights."""
        make_folder(self.configuration)
        describe(self.model, dtype, None, str(self.configuration))

    @property
    def folder(self) -> Path:
        return self._folder(self.number)

    def _folder(self, number: int) -> Path:
        return self._root / f"weights-{number}"

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, self._read(name)) for name in self._parameters)

    def copies(self) -> dict[str, torch.Tensor]:
        """Parameters (each once) and the buffers that are stored in the model's files."""
        return {name: self._read(name) for name in self._names}

    def blocks(self) -> dict[WeightBlock, Callable[[], torch.Tensor]]:
        blocks = {name: WeightBlock.whole(name, shape) for name, shape in self._parameters.items()}
        return {block: partial(self._read_stored, name) for name, block in blocks.items()}

    def receive(self, source: GivesParameters, eta: float) -> Callable[[], None]:
        """Write mine ← eta · theirs + (1 − eta) · mine next to the current weights. The result
        makes them the current ones.

        Raises ModelError for parameters that are not those of the model, and for a mixture of
        rounded ones, which would stay where it is.
        """
        if eta != 1 and self._dtype != torch.float32:
            message = (
                f"role {self._role} follows with eta {eta:g}, but keeps its weights in the "
                f"servers' {self._dtype}"
            )
            raise ModelError(
                message, hint="start the servers with dtype float32, or follow with eta 1"
            )

        def mixed() -> Iterator[tuple[str, torch.Tensor]]:
            for name, theirs in in_order(source, self._parameters, self._role):
                yield name, theirs if eta == 1 else self._read(name).lerp(theirs, eta)

        return self._written(mixed())

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Adopt tensors in the form that `copies` returns."""
        for name in set(self._names) - set(self._parameters):
            self.model.get_buffer(name).copy_(weights[name])
        self._written((name, weights[name]) for name in self._parameters)()

    def remove_old(self) -> None:
        """Remove all but the current weights: no server needs others any more."""
        for folder in self._root.glob("weights-*"):
            if folder != self.folder:
                shutil.rmtree(folder)

    def _read(self, name: str) -> torch.Tensor:
        """A parameter or buffer; floating-point numbers as float32, as checkpoints hold them."""
        tensor = self._read_stored(name)
        return tensor.float() if tensor.is_floating_point() else tensor

    def _read_stored(self, name: str) -> torch.Tensor:
        """The same in the dtype of the servers."""
        return self._source.read(name)

    def _written(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], None]:
        number = self.number + 1
        return partial(self._use, number, self._saved(parameters, self._folder(number)))

    def _use(self, number: int, source: ModelSource) -> None:
        self.number, self._source = number, source

    def _saved(self, parameters: Iterable[tuple[str, torch.Tensor]], folder: Path) -> ModelSource:
        alone = SavingRanks(leads=True, groups=(), device=torch.device("cpu"))
        save_model(self.model, parameters, None, folder, self._dtype, alone)
        return open_source(str(folder), head="lm", tokenizer=None, seed=0)


def in_order(
    source: GivesParameters, shapes: Shapes, role: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters, float32 on the host, in the order of `shapes`;
    those that arrive early are kept.

    Raises ModelError for one that is missing or has another shape.
    """
    missing = {name: WeightBlock.whole(name, shape).numbers for name, shape in shapes.items()}
    arrived: dict[str, torch.Tensor] = {}
    turns = iter(shapes)
    turn = next(turns, None)
    for block, numbers in source.parameter_blocks():
        if shapes.get(block.name) != block.shape:
            raise ModelError(f"role {role} cannot follow {block.name}: it has no such parameter")
        arriving = arrived.setdefault(block.name, torch.empty(block.shape))
        arriving[block.within(WeightBlock.whole(block.name, block.shape))] = numbers.detach().to(
            "cpu", torch.float32
        )
        missing[block.name] -= block.numbers
        while turn is not None and not missing[turn]:
            yield turn, arrived.pop(turn)
            turn = next(turns, None)
    if turn is not None:
        raise ModelError(f"role {role} follows {turn}, but did not receive all of it")
