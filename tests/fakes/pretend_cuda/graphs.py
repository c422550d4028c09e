"""CUDA graphs of the pretend device: a capture records operations and, as on a GPU, changes no
memory that existed before; each replay repeats them on the same memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pretend_cuda.state import active

_NEEDS_THE_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
REFUSED = "CUDA error: operation not permitted when stream is capturing: {}"

Repeat = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


@dataclass
class PretendGraph:
    """`torch.cuda.CUDAGraph`."""

    operations: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = field(
        default_factory=list
    )
    _before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Memory that the capture wrote to, and its contents before."""
    repeat: Repeat | None = None
    thread: int | None = None
    """The only one whose work is captured; None: that of all."""

    @property
    def captures(self) -> bool:
        """Whether what this thread does belongs to the capture."""
        return self.thread in (None, threading.get_ident())

    def record(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Repeat
    ) -> Any:
        """The result of an operation in a capture. Raises RuntimeError if the host takes part."""
        self.repeat = run
        inputs = _tensors((args, kwargs))
        if _asks_host(operation, inputs):
            raise RuntimeError(REFUSED.format(operation))
        for tensor in _written(operation, args, kwargs):
            self._keep(tensor.host.untyped_storage())
        result = run(operation, args, kwargs)
        sides = {_is_of_host(tensor) for tensor in [*inputs, *_tensors(result)]}
        if len(sides) == 2:  # a copy from one to the other
            raise RuntimeError(REFUSED.format(operation))
        if False in sides:
            self.operations.append((operation, args, kwargs, result))
        return result

    def _keep(self, memory: torch.UntypedStorage) -> None:
        content = torch.empty(0, dtype=torch.uint8).set_(memory)
        self._before.setdefault(memory.data_ptr(), (content, content.clone()))

    def end(self) -> None:
        """Undo what the capture has written."""
        for memory, contents in self._before.values():
            memory.copy_(contents)
        self._before.clear()

    def replay(self) -> None:
        for operation, args, kwargs, recorded in self.operations:
            assert self.repeat is not None
            inputs = {_memory_of(tensor) for tensor in _tensors((args, kwargs))}
            result = self.repeat(operation, args, kwargs)
            for old, new in zip(_tensors(recorded), _tensors(result), strict=True):
                if _memory_of(old) not in inputs:  # neither a view nor an argument itself
                    old.host.copy_(new.host)

    def reset(self) -> None:
        self.operations.clear()


class Capture:
    """`torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: PretendGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ):
        self._graph = cuda_graph
        self._mode = capture_error_mode

    def __enter__(self) -> None:
        others_may_work = self._mode == "thread_local"
        self._graph.thread = threading.get_ident() if others_may_work else None
        active().capturing = self._graph

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        active().capturing = None
        self._graph.end()


def _asks_host(operation: Any, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the host must wait for what tensors of the device hold."""
    if all(map(_is_of_host, inputs)):
        return False
    if operation is torch.ops.aten.index.Tensor:  # a mask selects an unknown number
        return any(tensor.dtype is torch.bool for tensor in inputs[1:])
    return any(tag in operation.tags for tag in _NEEDS_THE_HOST)


def _is_of_host(tensor: torch.Tensor) -> bool:
    """A host tensor that is more than a number, which kernels take as an argument."""
    return not hasattr(tensor, "host") and tensor.dim() > 0


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Device tensors among the arguments that an operation changes."""
    written = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [tensor for tensor in _tensors(value) if hasattr(tensor, "host")]
    return written


def _tensors(values: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory_of(tensor: Any) -> int:
    host: torch.Tensor = getattr(tensor, "host", tensor)
    return host.untyped_storage().data_ptr()


def torch_cuda_graphs() -> dict[str, Any]:
    return {
        "CUDAGraph": PretendGraph,
        "graph": Capture,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: active().capturing is not None,
    }
