"""The memory of a client of servers and of its servers, their number and their devices. No torch:
`rlcli plan` imports this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.memory import Generation, Kept, MemoryModel, Parts, ServerMemory

from ._server_devices import VISIBLE, devices_of_a_server

WIDTHS = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
"""Bytes per number of the weights that are sent; without a dtype, as the model is stored
(`_server_weights`)."""
AT_ONCE = 64
"""`max_concurrent_requests` unless it is given (`_server_backend`)."""


class ClientMemory(MemoryModel):
    """The client has weights as files: one parameter at a time is in memory,
    and all of them for a checkpoint. Its servers are SGLang's."""

    FRACTION: ClassVar[str] = "mem_fraction_static"
    """Option for the share of a device's memory that weights and cache take."""
    USUAL_FRACTION: ClassVar[float] = 0.87
    """Its value unless it is given: of 80 GiB, SGLang leaves about 10 to its graphs and
    activations."""

    def resident(self) -> Kept:
        return Kept(0)

    def load(self) -> Parts:
        return Parts()

    def snapshot(self) -> int:
        return 4 * self._parameters

    def generate(self, asked: Generation) -> Parts:
        return Parts()

    def savings(self) -> list[list[dict[str, Any]]]:
        """Smaller caches."""
        options = self.role.arguments.get("options") or {}
        names = (name for name in options if name.replace("-", "_") == self.FRACTION)
        key = next(names, self.FRACTION)
        shares = (tenths / 10 for tenths in range(8, 1, -1))
        return [[{f"options.{key}": share} for share in shares if share < self._fraction]]

    def server(self, device_bytes: int | None) -> ServerMemory:
        arguments, options = self.role.arguments, _options(self.role.arguments)
        dtype = options.get("dtype")
        width = 4 if dtype in ("float32", "float") else 2
        sent = WIDTHS.get(str(dtype), self.role.architecture.stored_width)
        weights = width * self._parameters // arguments.get("tp", 1)
        share = int(self._fraction * (device_bytes or 0))
        sizes = self.role.architecture
        heads = max(1, sizes.kv_heads // arguments.get("tp", 1))
        return ServerMemory(
            weights,
            cache=max(0, share - weights),
            sent=sent * self._parameters,
            at_once=arguments.get("max_concurrent_requests", AT_ONCE),
            per_token=2 * heads * sizes.head_dim * len(sizes.layers) * width,
        )

    @property
    def _fraction(self) -> float:
        """Share of a device's memory; if the option is not a number, the server will say so."""
        fraction = _options(self.role.arguments).get(self.FRACTION)
        return fraction if isinstance(fraction, int | float) else self.USUAL_FRACTION

    @property
    def _parameters(self) -> int:
        return self.role.architecture.parameters(self.role.head)


class VLLMClientMemory(ClientMemory):
    """The same with servers of vLLM."""

    FRACTION: ClassVar[str] = "gpu_memory_utilization"
    USUAL_FRACTION: ClassVar[float] = 0.92


def servers_of_a_rank(args: Mapping[str, Any]) -> int:
    """Number of servers that the run starts for each rank of a role,
    from the arguments of its backend."""
    return args.get("servers", 1) if args.get("python") is not None else 0


def nodes_of_a_server(args: Mapping[str, Any]) -> int:
    """Number of nodes over which each server is spread."""
    count = args.get("nodes", 1)
    return count if type(count) is int and count > 0 else 1


def devices_of_servers(args: Mapping[str, Any], device: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each server of a rank, as numbers on each of its nodes; `device` is the
    rank's. They are that device and the following ones, unless the environment of servers names
    theirs. None for a server that computes on processors."""
    count, size = servers_of_a_rank(args), devices_of_a_server(args) // nodes_of_a_server(args)
    if _options(args).get("device") == "cpu":
        return ((),) * count
    visible = (args.get("environment") or {}).get(VISIBLE)
    if visible is not None:
        named = [int(word) for word in str(visible).split(",") if word.strip().isdigit()]
        return (tuple(named[:size]),) * count
    return tuple(
        tuple(range(device + size * server, device + size * (server + 1)))
        for server in range(count)
    )


def _options(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The servers' options, by the names of Python arguments."""
    return {name.replace("-", "_"): value for name, value in (args.get("options") or {}).items()}
