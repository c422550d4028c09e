"""Messages between master and workers: msgpack maps, checked on arrival. No pickle."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from rlcli import errors
from rlcli.errors import RlcliError

LARGEST = 1 << 26
"""Bytes of one message; the metadata of a batch is far smaller."""


COMPUTE, MOVES = "compute", "moves"
"""Two lanes of a rank: its own computation, and its data lane. Lanes of pools are named by `pool_lane`."""
MOVE = "move"
"""A request to a data lane."""
END_LANE = "end_lane"
"""The last request to a lane other than COMPUTE."""

UNEXPECTED = "RlcliError"
"""Kind of a failure that is not one of the errors made for users."""


LOST_PEER = "F09"
"""Code of the failure of a rank that could not exchange tensors with another one."""
FROM_GLOO = re.compile(r"\[\S*/gloo/transport/\S+\] (?P<problem>.*?)(\. |$)", re.DOTALL)
"""An error of gloo's connections, and what it says before it gives advice."""


class ProtocolError(ValueError):
    """A message that is not one of ours."""


@dataclass(frozen=True)
class Request:
    """Master → worker: run `op` with `args`."""

    number: int
    op: str
    args: dict[str, Any] = field(default_factory=dict)
    lane: str = COMPUTE
    """The worker's thread that answers. Each does one thing after the other, and they work in parallel."""

    @property
    def name(self) -> str:
        """Its name for people: that of the graph's call, if it is one."""
        return str(self.args.get("call", self.op))


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker to the master."""

    kind: str
    what: str
    code: str
    where: str | None
    hint: str | None
    traceback: str

    @staticmethod
    def of(error: BaseException, where: str, traceback: str) -> Failure:
        if (gloo := _error_of_gloo(error)) is not None:
            message = f"tensors could not be exchanged with another rank: {gloo}"
            hint = "if no rank has ended, others may have connected to their ports on launch.interface"
            return Failure(errors.WorkerError.__name__, message, LOST_PEER, where, hint, traceback)
        if isinstance(error, RlcliError):
            return Failure(type(error).__name__, error.what, error.code, error.where or where, error.hint, traceback)
        return Failure(UNEXPECTED, f"{type(error).__name__}: {error}", "BUG", where, None, traceback)

    @property
    def is_unexpected(self) -> bool:
        """Whether it was unforeseen: a bug, ours or a component's, or a consequence of another rank's death."""
        return self.kind in (UNEXPECTED, errors.ProjectError.__name__) or self.code == LOST_PEER

    def as_error(self) -> RlcliError:
        """The worker's error with its class, so that the exit code is preserved."""
        cls = getattr(errors, self.kind, RlcliError)
        if not (isinstance(cls, type) and issubclass(cls, RlcliError)) or cls is errors.RecipeError:
            cls = RlcliError
        error = cls(self.what, where=self.where, hint=self.hint, code=self.code)
        error.add_note(self.traceback)
        return error


def _error_of_gloo(error: BaseException | None) -> str | None:
    """What gloo says, if the error is one of its connections or was raised from one: no component is to blame."""
    while error is not None:
        if isinstance(error, RuntimeError) and (match := FROM_GLOO.match(str(error))) is not None:
            return match["problem"]
        error = error.__cause__
    return None


@dataclass(frozen=True)
class Reply:
    """Worker → master: the result of request `number`."""

    number: int
    rank: int
    value: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True)
class Report:
    """Worker → master, unsolicited: `name` has happened, or `failure` has kept it from happening."""

    rank: int
    name: str
    value: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


Message = Request | Reply | Report

Tell = Callable[[str, dict[str, Any], Failure | None], None]
"""How a worker's threads report: name, value, failure."""


def pack(message: Message, token: bytes) -> bytes:
    kind = type(message).__name__.lower()
    packed: bytes = msgpack.packb({"token": token, "kind": kind, **vars(message)}, default=asdict, use_bin_type=True)
    return packed


def unpack(frame: bytes, token: bytes, *expected: type[Message], most: int = LARGEST) -> Any:
    """The message in a frame. Raises ProtocolError if it is not one of the `expected` with our token, or has more than
    `most` bytes."""
    if len(frame) > most:
        raise ProtocolError(f"a message of {len(frame)} bytes; at most {most} are read")
    try:
        fields = msgpack.unpackb(frame, raw=False)
    except Exception as error:  # msgpack raises many kinds; all mean the same here
        raise ProtocolError(f"not a message: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("token"), bytes):
        raise ProtocolError("not a message: no token")
    if not hmac.compare_digest(fields.pop("token"), token):
        raise ProtocolError("wrong token")
    kinds = {cls.__name__.lower(): cls for cls in expected}
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ProtocolError(f"not a {' or '.join(kinds)}")
    return _READERS[kinds[kind]](fields)


def _request(fields: dict[str, Any]) -> Request:
    if fields.keys() != {"number", "op", "args", "lane"} or not isinstance(fields["args"], dict):
        raise ProtocolError("not a request: wrong fields")
    if not (_is_count(fields["number"]) and isinstance(fields["op"], str) and isinstance(fields["lane"], str)):
        raise ProtocolError("not a request: number, op or lane is of the wrong type")
    return Request(**fields)


def _reply(fields: dict[str, Any]) -> Reply:
    if fields.keys() != {"number", "rank", "value", "failure"} or not isinstance(fields["value"], dict):
        raise ProtocolError("not a reply: wrong fields")
    if not (type(fields["number"]) is int and _is_count(fields["rank"])):
        raise ProtocolError("not a reply: number or rank is of the wrong type")
    return Reply(**fields | {"failure": _failure(fields["failure"])})


def _report(fields: dict[str, Any]) -> Report:
    if fields.keys() != {"rank", "name", "value", "failure"} or not isinstance(fields["value"], dict):
        raise ProtocolError("not a report: wrong fields")
    if not (_is_count(fields["rank"]) and isinstance(fields["name"], str)):
        raise ProtocolError("not a report: rank or name is of the wrong type")
    return Report(**fields | {"failure": _failure(fields["failure"])})


def _failure(fields: Any) -> Failure | None:
    if fields is None:
        return None
    if not isinstance(fields, dict) or fields.keys() != Failure.__dataclass_fields__.keys():
        raise ProtocolError("malformed failure")
    optional = ("where", "hint")
    if not all(isinstance(text, str) or (text is None and name in optional) for name, text in fields.items()):
        raise ProtocolError("malformed failure")
    return Failure(**fields)


_READERS: dict[type[Message], Callable[[dict[str, Any]], Message]] = {
    Request: _request,
    Reply: _reply,
    Report: _report,
}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
