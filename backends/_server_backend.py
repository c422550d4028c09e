"""Backends whose responses come from inference servers, started by the run or existing ones.

The role's ranks are clients: they need no device of their own. Servers require their own versions
of torch and transformers, so they are in another environment (`python`) and are never imported
here. What differs between kinds of servers is in a `Dialect`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlcli.api.limits import Alternatives, ArgumentCheck, Limits, check_arguments
from rlcli.api.model import Model, ModelBackend
from rlcli.errors import ModelError, UsageError
from rlcli.owned_folder import OwnedFolder, remove_abandoned

from ._argument_checks import check_servers

if TYPE_CHECKING:
    from rlcli.api.model_source import ModelSource

    from ._server_dialect import Dialect
    from ._server_pool import Servers
    from ._server_process import Server
    from ._server_weights import WeightFolder

Pause = Literal["retract", "in_place"]


@dataclass(frozen=True, kw_only=True)
class ServerBackend(ModelBackend):
    """Generates with servers whose weights follow those of the trained role."""

    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_servers"
    TRAINS: ClassVar[bool] = False
    SCORES: ClassVar[bool] = False
    REPRODUCIBLE: ClassVar[bool] = False
    ROUTING_REPLAY: ClassVar[bool] = True
    STREAMS: ClassVar[bool] = True
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    MEMORY: ClassVar[str] = "_server_memory.ClientMemory"
    SERVERS: ClassVar[str] = "_server_memory.servers_of_a_rank"
    SERVER_DEVICES: ClassVar[str] = "_server_memory.devices_of_servers"
    SERVER_NODES: ClassVar[str] = "_server_memory.nodes_of_a_server"
    FILES: ClassVar[tuple[str, ...]] = ("python", "weights_folder")
    LIMITS: ClassVar[Limits] = {
        "servers": {"ge": 1, "le": 1024},
        "tp": {"ge": 1, "le": 1024},
        "nodes": {"ge": 1, "le": 1024},
        "max_concurrent_requests": {"ge": 1},
        "start_deadline_s": {"gt": 0},
        "request_deadline_s": {"gt": 0},
        "update_deadline_s": {"gt": 0},
    }
    ONE_OF: ClassVar[Alternatives] = ("python", "urls")
    PER_RANK: ClassVar[tuple[str, ...]] = ("urls",)
    VARIABLES: ClassVar[tuple[str, ...]] = ("api_key_env",)
    ON_RESUME: ClassVar[dict[str, str]] = {
        "python": "safe", "servers": "safe", "tp": "safe", "nodes": "safe", "options": "safe",
        "environment": "safe", "urls": "safe", "api_key_env": "safe",
        "max_concurrent_requests": "safe", "update": "safe", "on_pause": "safe",
        "weights_folder": "safe", "start_deadline_s": "safe", "request_deadline_s": "safe",
        "update_deadline_s": "safe",
    }  # fmt: skip

    python: str | None = None
    """Path of the Python that servers are started with, such as `.venv-sglang/bin/python`; they end
    with the run. null: the existing servers at `urls` are used."""

    servers: int = 1
    """Servers that each rank of the role starts."""

    tp: int = 1
    """Processes per server, which share its model (tensor parallelism)."""

    nodes: int = 1
    """Number of nodes that each server of the run spans: its rank's node and the ones after it,
    with the same number of devices on each. With several, all nodes must have access to
    `weights_folder`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the servers that the run starts, under the server's own names, such as `{dtype:
    bfloat16}`. Weights are stored and sent in this `dtype`; without one, in that of the model's
    configuration."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the servers' processes. On GPUs, the servers of a rank use its
    device and the ones after it, each its own; CUDA_VISIBLE_DEVICES, if set here, applies to all of
    them instead."""

    urls: tuple[str, ...] = ()
    """Existing servers, such as `http://10.0.0.5:30000`; the ranks of the role divide them. They
    get new weights in the dtype that they report, and nothing else may use them until the run ends.
    A server of another model is refused; this is checked by its tokens, its vocabulary and its
    log-probs."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the API key of the servers at `urls`."""

    max_concurrent_requests: int = 64
    """Maximum number of responses that a rank requests at once."""

    update: Literal["process_group", "disk"] = "disk"
    """How servers get new weights: process_group (sent to them) or disk (they read
    `weights_folder`)."""

    on_pause: Pause = "retract"
    """What happens to responses in progress when weights change: retract (their tokens so far are
    processed again with the new weights, so that the log-probs of each segment belong to the
    weights that sampled it) or in_place (their keys and values are kept, which is faster, but
    log-probs are approximate)."""

    weights_folder: str | None = None
    """Folder in which the current weights are kept as files; servers at `urls` must have access to
    it if they update from disk. null: a private temporary folder."""

    start_deadline_s: float = 900.0
    """Seconds until a server that the run starts must be ready; servers at `urls` have 120 s."""

    request_deadline_s: float = 1800.0
    """Seconds for one response."""

    update_deadline_s: float = 600.0
    """Seconds for an update of the weights."""

    def __post_init__(self) -> None:
        check_arguments(self)
        check_servers(self)

    def _initialize(self, model: Model) -> Model:
        from ._server_attach import Expected, check_logprobs, check_model
        from ._server_engine import ServerEngine

        source = model.required_source
        if source.head != "lm":
            raise ModelError(
                f"role {model.name} has the head {source.head}, but servers only generate"
            )
        parent = Path(self.weights_folder or tempfile.gettempdir())
        remove_abandoned(parent)
        folder = OwnedFolder(parent, f"{model.name}-")
        with ExitStack() as undo:
            undo.callback(folder.close)
            servers, weights = self._servers_with_weights(undo, model, source, folder.path)
            ids = weights.model.config.vocab_size
            expected = Expected(model.name, model.tokenizer, ids, self.tp, self.request_deadline_s)
            if self.urls:
                servers.each(lambda server: check_model(server, expected))
            model.module = ServerEngine(
                model, weights, servers, folder, self.max_concurrent_requests, self.on_pause
            )
            if self.urls:
                servers.each(lambda server: check_logprobs(server, expected))
            undo.pop_all()
        return model

    def _servers_with_weights(
        self, undo: ExitStack, model: Model, source: ModelSource, folder: Path
    ) -> tuple[Servers, WeightFolder]:
        """Ready servers, and the folder with the model's weights in the dtype in which they hold
        them. Raises WorkerError, ResourceError, UsageError."""
        from ._server_attach import held_dtype
        from ._server_weights import WeightFolder, dtype_of

        if self.urls:
            servers = self._started(undo, self._at_urls(model))
            dtype = held_dtype(servers.servers, source.config)
            return servers, WeightFolder(model.name, source, folder, dtype)
        weights = WeightFolder(model.name, source, folder, dtype_of(self.options, source.config))
        return self._started(undo, self._of_the_run(model, weights.configuration)), weights

    def _dialect(self) -> Dialect:
        """The kind of its servers."""
        raise NotImplementedError

    def _started(self, undo: ExitStack, servers: Sequence[Server]) -> Servers:
        """Ready servers, which `undo` ends. Raises WorkerError, ResourceError."""
        from ._server_http import Deadlines
        from ._server_pool import Servers

        deadlines = Deadlines(self.request_deadline_s, self.update_deadline_s)
        pool = Servers(servers, self.update, deadlines)
        undo.callback(pool.close)
        pool.start()
        return pool

    def _at_urls(self, model: Model) -> list[Server]:
        """This rank's share of the existing servers. Raises UsageError."""
        from ._server_process import attached

        rank, ranks = (
            (0, 1)
            if model.device_mesh is None
            else (model.device_mesh["dp"].get_local_rank(), model.device_mesh.size())
        )
        mine = self.urls[rank::ranks]
        if not mine:
            raise UsageError(
                f"role {model.name} has {ranks} ranks and {len(self.urls)} servers", code="R39"
            )
        key = _key(os.environ, self.api_key_env)
        return attached(self._dialect(), mine, key, self.tp, self.start_deadline_s)

    def _of_the_run(self, model: Model, configuration: Path) -> list[Server]:
        """The servers that the run starts for this rank. Raises UsageError."""
        from rlcli.server_slot import ServerSlot

        from ._server_process import Launch, started_servers

        assert self.python is not None
        slots = [ServerSlot(folder) for folder in model.server_folders]
        if len(slots) != self.servers * self.nodes:
            raise UsageError(
                f"nothing here starts the servers of role {model.name}", hint="use urls", code="R39"
            )
        dialect = self._dialect()
        return started_servers(
            [
                Launch(
                    dialect,
                    self.python,
                    configuration,
                    self.options,
                    self._environment(model, number),
                    self.tp,
                    tuple(slots[number * self.nodes : (number + 1) * self.nodes]),
                    self.start_deadline_s,
                )
                for number in range(self.servers)
            ]
        )

    def _environment(self, model: Model, number: int) -> dict[str, str]:
        """The variables of one of this rank's servers, with its devices on each of its nodes.
        Raises UsageError."""
        from ._server_devices import VISIBLE, devices_of_a_server, share

        if VISIBLE in self.environment or model.device.type != "cuda":
            return dict(self.environment)
        size = devices_of_a_server(vars(self)) // self.nodes
        first = (model.device.index or 0) + number * size
        devices = share(os.environ, first, size)
        if devices is None:
            message = (
                f"server {number} of role {model.name} needs {size} devices, starting at device "
                f"{first} of the node, and sees fewer"
            )
            raise UsageError(
                message,
                hint=f"{VISIBLE} is {os.environ[VISIBLE]}: list enough devices for each rank",
                code="R50",
            )
        return {**self.environment, VISIBLE: devices}

    def destroy(self, model: Model) -> None:
        if model.module is not None:
            model.module.close()


def _key(environment: Mapping[str, str], variable: str | None) -> str | None:
    if variable is not None and not environment.get(variable):
        raise UsageError(
            f"api_key_env names {variable}, which is not set",
            hint=f"export {variable}=…",
            code="R39",
        )
    return environment[variable] if variable is not None else None
