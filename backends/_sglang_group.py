"""Sends the weights of a folder to one SGLang server, in a process group."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rlcli.api.http_request import ServerGone

from ._server_dialect import WeightUpdate
from ._server_http import Endpoint, ServerRefused

BUCKET_BYTES = 256 << 20
"""Maximum size of tensors that are sent together; a larger tensor is sent alone."""
CODES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
WIND_UP_S = 10.0
"""Seconds for our part of a transfer once the server reports that its own part is done."""


def by_process_group(
    server: Endpoint, update: WeightUpdate, ranks: int, address: str, seconds: float
) -> None:
    """Send the tensors to the server's `ranks` processes, one after the other.
    They reach us at `address`.

    The group only exists during the update: an old one would break when a server is restarted.
    """
    group = _WeightGroup(server, ranks, address, seconds)
    try:
        _begin(server, seconds)
        buckets = _buckets(update.folder)
        bucket: tuple[list[str], list[torch.Tensor]] | None = next(buckets)
        while bucket is not None:
            following = next(buckets, None)
            last = {"weight_version": update.label} if following is None else {}
            group.send(*bucket, {"flush_cache": update.flushes and following is None, **last})
            bucket = following
        server.post("/end_weight_update", {}, seconds)
    finally:
        group.close()


def _begin(server: Endpoint, seconds: float) -> None:
    """Begin an update. One that has been left open, because its connection broke or its run was
    killed, is ended first: the server refuses a second one."""
    try:
        server.post("/begin_weight_update", {}, seconds)
    except ServerRefused:
        server.post("/end_weight_update", {}, seconds)
        server.post("/begin_weight_update", {}, seconds)


def _listening(address: str) -> socket.socket:
    """Torch's own would listen on all interfaces."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


class _WeightGroup:
    """This process is rank 0, the server's processes are the others. Gloo,
    because our tensors are on the host."""

    def __init__(self, server: Endpoint, ranks: int, address: str, seconds: float):
        self._server = server
        self._seconds = seconds
        self._name = f"rlcli-{uuid.uuid4().hex}"
        listening = _listening(address)
        port = listening.getsockname()[1]
        patience = timedelta(seconds=seconds)
        store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._group: Any = None
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": self._name,
            "backend": "gloo",
        }

        def join() -> None:
            gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = patience
            # torch's name for the keys of a group, and SGLang's for a custom group
            prefixed = PrefixStore(
                "cpu/", PrefixStore(f"{self._name}/", PrefixStore(self._name, store))
            )
            self._group = gloo(prefixed, 0, 1 + ranks, options)

        self._together("/init_weights_update_group", body, join)

    def send(
        self, names: list[str], tensors: list[torch.Tensor], options: Mapping[str, Any]
    ) -> None:
        body = {
            "names": names,
            "dtypes": [CODES[one.dtype] for one in tensors],
            "shapes": [list(one.shape) for one in tensors],
            "group_name": self._name,
            **options,
        }

        def broadcast() -> None:
            for tensor in tensors:
                self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

        self._together("/update_weights_from_distributed", body, broadcast)

    def close(self) -> None:
        with suppress(Exception):  # the server may be gone, and with it its end of the group
            self._server.post(
                "/destroy_weights_update_group", {"group_name": self._name}, WIND_UP_S
            )
        if self._group is not None:
            self._group.abort()

    def _together(self, path: str, body: Mapping[str, Any], send: Callable[[], None]) -> None:
        """Run the server's part and ours in parallel. If the server refuses its part, ours waits in
        a thread until the group is closed or its time is over."""
        failed: list[Exception] = []

        def work() -> None:
            try:
                send()
            except Exception as problem:
                failed.append(problem)

        ours = threading.Thread(target=work, name="weights to a server", daemon=True)
        ours.start()
        self._server.post(path, body, self._seconds)
        ours.join(WIND_UP_S)
        if failed or ours.is_alive():
            raise ServerGone(
                f"the weights were not sent: {failed[0] if failed else 'the group is stuck'}"
            )


def _buckets(folder: Path) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
    """(names, tensors) from the files; at least one bucket."""
    from safetensors import safe_open

    names: list[str] = []
    tensors: list[torch.Tensor] = []
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is not a dictionary
                tensor = stored.get_tensor(name)
                if names and size + tensor.nbytes > BUCKET_BYTES:
                    yield names, tensors
                    names, tensors, size = [], [], 0
                names.append(name)
                tensors.append(tensor)
                size += tensor.nbytes
    yield names, tensors
