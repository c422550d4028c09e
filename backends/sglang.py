"""Responses come from SGLang servers, 0.5.21 or later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rlcli.api.model import register_backend

from ._server_backend import ServerBackend

if TYPE_CHECKING:
    from ._server_dialect import Dialect


@register_backend("sglang")
@dataclass(frozen=True, kw_only=True)
class SGLang(ServerBackend):
    """Generates with SGLang servers, whose weights follow those of the trained role."""

    SERVER_REQUIRES: ClassVar[tuple[str, ...]] = ("sglang>=0.5.21",)
    ELSEWHERE: ClassVar[str] = "lmdeploy tensorrt_llm trtllm tgi"

    update: Literal["process_group", "disk"] = "process_group"
    """How servers get new weights: process_group (sent to them) or disk (they read
    `weights_folder`)."""

    def _dialect(self) -> Dialect:
        from ._sglang_dialect import SGLangDialect

        return SGLangDialect()
