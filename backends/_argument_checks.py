"""Whether the arguments of a backend fit together. Each check takes a backend, or any object with
its arguments as attributes, and raises ValueError. No torch: `rlcli check` imports this."""

from __future__ import annotations

from typing import Any

from ._server_devices import devices_of_a_server


def check_zero(settings: Any) -> None:
    """The arguments of `deepspeed`."""
    if settings.offload_optimizer and settings.zero_stage == 0:
        raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
    if settings.offload_parameters and settings.zero_stage != 3:
        raise ValueError("offload_parameters needs zero_stage 3")


def check_megatron(settings: Any) -> None:
    """The arguments of `megatron`."""
    if settings.sequence_parallel:
        raise ValueError(
            "sequence_parallel is not supported yet; mesh.cp divides sequences, norms included"
        )


def check_servers(settings: Any) -> None:
    """The arguments of backends whose responses come from servers."""
    from ._server_http import Endpoint

    devices = devices_of_a_server(vars(settings))
    if devices % settings.nodes:
        raise ValueError(
            f"{devices} devices per server cannot be divided among nodes: {settings.nodes}"
        )
    if settings.nodes > 1 and settings.python is not None and settings.weights_folder is None:
        raise ValueError(
            f"nodes is {settings.nodes}, so weights_folder must name a folder that all nodes see"
        )
    for url in settings.urls:
        Endpoint(url.rstrip("/"))


def check_vllm(settings: Any) -> None:
    """The arguments of `vllm`."""
    check_servers(settings)
    if settings.nodes > 1:
        raise ValueError(f"nodes is {settings.nodes}, but a vllm server runs on one node")
