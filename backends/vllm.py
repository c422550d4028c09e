"""Responses come from vLLM servers, 0.32 or later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rlcli.api.limits import ArgumentCheck, check_arguments
from rlcli.api.model import register_backend

from ._argument_checks import check_vllm
from ._server_backend import ServerBackend

if TYPE_CHECKING:
    from ._server_dialect import Dialect


@register_backend("vllm")
@dataclass(frozen=True, kw_only=True)
class VLLM(ServerBackend):
    """Generates with vLLM servers, whose weights follow those of the trained role."""

    SERVER_REQUIRES: ClassVar[tuple[str, ...]] = ("vllm>=0.32",)
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_vllm"
    MEMORY: ClassVar[str] = "_server_memory.VLLMClientMemory"

    update: Literal["disk"] = "disk"
    """How servers get new weights: they read `weights_folder`."""

    def __post_init__(self) -> None:
        check_arguments(self)
        check_vllm(self)

    def _dialect(self) -> Dialect:
        from ._vllm_dialect import VLLMDialect

        return VLLMDialect()
