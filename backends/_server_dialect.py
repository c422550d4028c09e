"""What differs between kinds of inference servers: how one is started, its endpoints and the names
of its fields. Everything else about servers is the same code (`_server_*.py`)."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rlcli.api.config import GenerationHyperparameters

from ._server_http import Endpoint

Body = Mapping[str, Any]
Call = tuple[str, Body]
"""A POST request: its path and its body."""


@dataclass(frozen=True)
class ResponseRequest:
    """A request for a response."""

    prompt: Sequence[int]
    parameters: Body
    """Sampling parameters, by the server's names (`Dialect.sampling_parameters`)."""
    max_new_tokens: int
    seed: int
    id: str
    bytes_of_experts: int = 0
    """Room for the experts of all tokens in the answer."""
    taken_at: int | None = None
    """The update (`Servers.updates`) after which the response was last taken from a server."""


def new_id() -> str:
    """An id for a request: a server refuses one that it works on already."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class ServerReply:
    """A server's answer to such a request, by our names; not checked yet."""

    id: Any
    tokens: Any
    logged: Any
    """(token, log-prob) of each token."""
    finish: Any
    """stop, length or abort."""
    versions: Any
    """`{version, start, end}` of each span of tokens that were sampled with the same weights."""
    experts: Any = None
    """The experts of every token of prompt and response but the last (`_server_experts`); None: it
    does not say."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights for a server."""

    folder: Path
    label: str
    """The server's name for them from then on."""
    flushes: bool
    """Whether it discards keys and values computed with the old ones."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server reports about itself; None: it does not say."""

    processes: Any = None
    """How many processes share its model."""
    dtype: Any = None
    has_tokenizer: bool = True
    own_sampling: Sequence[str] = field(default_factory=tuple)
    """The server's own settings that change every distribution."""
    unsuitable: tuple[str, str] | None = None
    """What makes it unsuitable, and how to start it instead."""


class Dialect(ABC):
    """One kind of server. Requests raise the errors of `Endpoint.post`; readers raise KeyError,
    TypeError, IndexError, AttributeError or ValueError for an answer without what belongs to it."""

    NAME: ClassVar[str]
    OLDEST: ClassVar[str]
    """The first version that has all of the endpoints."""
    MODULE: ClassVar[str]
    """Started with `python -m`."""
    READY: ClassVar[str]
    """Answers once the server takes requests."""
    ALIVE: ClassVar[str]
    """Answers while the server can still write a token."""
    GENERATE: ClassVar[str]
    METRICS: ClassVar[Mapping[str, str]]
    """Its names of what `_server_metrics` reads."""
    PAUSING_ABORTS: ClassVar[bool] = False
    """Whether responses end when they are paused to be re-read with other weights: the client then
    requests the rest of them."""

    @property
    def hint(self) -> str:
        return f"is it {self.OLDEST} or later?"

    # -- starting ----------------------------------------------------------------------------------

    @abstractmethod
    def settings(self, model: Path, tp: int, key: str) -> dict[str, Any]:
        """Settings of a server that the run starts, without weights, which only this machine can
        reach."""

    def variables(self) -> dict[str, str]:
        """Environment variables of a server that the run starts."""
        return {"HF_HUB_OFFLINE": "1"}

    def settings_over_nodes(self, nodes: int, node: int, meeting: str) -> dict[str, Any]:
        """Further settings of one process of a server over several nodes."""
        raise NotImplementedError

    # -- responses ---------------------------------------------------------------------------------

    @abstractmethod
    def sampling_parameters(
        self, gconfig: GenerationHyperparameters, ends: Sequence[int]
    ) -> dict[str, Any]:
        """All sampling parameters but the seed and the number of tokens. Raises ModelError for
        settings under which the server's log-probs are not those of the whole distribution at the
        temperature."""

    @abstractmethod
    def body(self, request: ResponseRequest) -> dict[str, Any]: ...

    @abstractmethod
    def reply(self, raw: Any) -> ServerReply: ...

    # -- pauses and memory -------------------------------------------------------------------------

    @abstractmethod
    def pause(self, mode: str) -> Call:
        """`mode`: retract or in_place."""

    @abstractmethod
    def resume(self) -> Call: ...

    def recover(self) -> Sequence[Call]:
        """Has a server that an earlier run left paused take requests again."""
        return [self.resume()]

    @abstractmethod
    def abort(self, id_: str | None) -> Call:
        """Abort one request, or all."""

    @abstractmethod
    def release(self) -> Sequence[Call]:
        """Release the device's memory, in this order."""

    @abstractmethod
    def regain(self, content: str) -> Call:
        """Regain the memory for `weights`, before they are loaded, or for the `kv_cache`, after."""

    # -- weights -----------------------------------------------------------------------------------

    @abstractmethod
    def load(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        """Have the server read the folder, which it must be able to access."""

    def send(
        self, endpoint: Endpoint, update: WeightUpdate, ranks: int, address: str, seconds: float
    ) -> None:
        """Send the weights to the server's `ranks` processes, which reach us at `address`."""
        raise NotImplementedError

    @abstractmethod
    def label(self, endpoint: Endpoint, seconds: float) -> Any:
        """The version of its weights, as it reports it."""

    @abstractmethod
    def digest(self, endpoint: Endpoint, seconds: float) -> Any:
        """Something that is equal for equal weights; None if the server does not report it."""

    # -- what it says about itself -----------------------------------------------------------------

    @abstractmethod
    def facts(self, endpoint: Endpoint, seconds: float) -> ServerFacts: ...

    @abstractmethod
    def tokens_request(self, texts: Sequence[str]) -> Sequence[Call]:
        """Requests for the ids of texts, without special tokens."""

    @abstractmethod
    def read_tokens(self, answers: Sequence[Any]) -> list[list[int]]: ...

    @abstractmethod
    def bias_body(self, id_: int, request_id: str) -> dict[str, Any]:
        """A request with a bias of 0 for an id: it has no effect, and is refused for an id that
        does not exist."""

    @abstractmethod
    def logprobs_body(
        self, ids: Sequence[int], temperature: float, request_id: str
    ) -> dict[str, Any]:
        """A request for the log-probs of these ids after a prompt of id 0."""

    @abstractmethod
    def read_logprobs(self, raw: Any) -> tuple[Any, dict[int, Any]]:
        """(id of the request, log-prob by id)."""
