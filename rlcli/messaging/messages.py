"""Messages between master and workers: msgpack maps, checked on arrival. No pickle.

Warnings that a rank or a process of a pool logs, where no user looks, are forwarded to the
terminal, each once. The log of the process has them too, with all repetitions.
"""

from __future__ import annotations

import hmac
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from typing import Any, get_origin, get_type_hints

import msgpack

from rlcli import errors
from rlcli.errors import RlcliError, printable_traceback

LARGEST = 1 << 30
"""Bytes of one message. That of a batch holds the metadata of its rows, of which the tests of a
single program may take megabytes."""
FRAME = 1 << 18
"""Bytes of a frame. A message takes as many frames as it needs; of a peer that has not proved that
it has the key, no more than one is held in memory."""

LARGE_NUMBER = 1
"""Type of msgpack's extension for a whole number of more than 64 bits, in hexadecimal digits."""

COMPUTE = "compute"
"""The lane of a rank for its own computation; `topology.groups` names the others."""
MOVE = "move"
"""A request to a data lane."""
END_LANE = "end_lane"
"""The last request to a lane other than COMPUTE."""
LAST_REQUEST = "shutdown"
"""The last request to COMPUTE."""

HELLO = "hello"
"""Name of the report that a worker, or one of its other lanes, is up or cannot start."""
WARNED = "warned"
"""Name of the report of a warning: its `logger`, its `template` before any values are filled in,
its `text`."""
RESTARTED = "restarted"
"""Name of the report that a process of a server or pool was started again: its `group` and `name`,
the `machine`, and `how` it had ended."""
COUNTED = "counted"
"""Name of the report of how far a request is: its `number`, the name `of` what was requested, and
the `count` (`rlcli.api.headway.Count`)."""
WRITTEN = "checkpoint_written"
"""Name of the report that a rank's files of a checkpoint are on disk, or could not be written."""

SHOWN = 2000
"""Characters of a warning that are shown."""
LOGGER = "rlcli"
"""The logger above those of rlcli and of components; those of other libraries warn of what users
cannot change."""

UNEXPECTED = "RlcliError"
"""Kind of a failure that is not one of the errors made for users."""


Fields = dict[str, Any]
"""Arguments of a request, or what is answered or reported: what msgpack can write."""
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
    args: Fields = field(default_factory=dict)
    lane: str = COMPUTE
    """The worker's thread that answers. Each does one thing after the other,
    and they work in parallel."""

    @property
    def name(self) -> str:
        """Its name in messages for users: that of the graph's call, if it is one."""
        return str(self.args.get("call", self.op))


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker to the master."""

    kind: str
    message: str
    code: str
    where: str | None
    hint: str | None
    traceback: str

    @staticmethod
    def of(error: BaseException, where: str, shown: BaseException | None = None) -> Failure:
        """`where`: the process in which it happened; `shown`: whose traceback is shown,
        if not its own."""
        trace = "".join(traceback.format_exception(shown or error))
        if (gloo := _error_of_gloo(error)) is not None:
            message = f"tensors could not be exchanged with another rank: {gloo}"
            hint = (
                "if no rank has ended, another program may have connected to their ports on "
                "launch.interface"
            )
            return Failure(errors.WorkerError.__name__, message, LOST_PEER, where, hint, trace)
        if isinstance(error, RlcliError):
            return Failure(
                type(error).__name__,
                error.what,
                error.code,
                error.where or where,
                error.hint,
                trace,
            )
        return Failure(UNEXPECTED, f"{type(error).__name__}: {error}", "BUG", where, None, trace)

    @property
    def is_unexpected(self) -> bool:
        """Whether it was unforeseen: a bug, ours or a component's,
        or a consequence of another rank's death."""
        return self.kind in (UNEXPECTED, errors.ProjectError.__name__) or self.code == LOST_PEER

    def as_error(self) -> RlcliError:
        """The worker's error with its class, so that the exit code is preserved."""
        cls = getattr(errors, self.kind, RlcliError)
        if not (isinstance(cls, type) and issubclass(cls, RlcliError)) or cls is errors.RecipeError:
            cls = RlcliError
        error = cls(self.message, where=self.where, hint=self.hint, code=self.code)
        error.add_note(self.traceback)
        return error


def _error_of_gloo(error: BaseException | None) -> str | None:
    """What gloo says, if the error is one of its connections or was raised from one:
    no component is to blame."""
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
    value: Fields = field(default_factory=dict)
    failure: Failure | None = None
    timing: Fields = field(default_factory=dict, compare=False)
    """When it was worked on (`rlcli.api.timing.Timing`); empty if that was not recorded."""


@dataclass(frozen=True)
class Report:
    """Worker → master, unsolicited: `name` has happened,
    or `failure` has kept it from happening."""

    rank: int
    name: str
    value: Fields = field(default_factory=dict)
    failure: Failure | None = None


Message = Request | Reply | Report

Handle = Callable[[Request], Fields]
"""A worker's answer to a request."""
FailureOf = Callable[[BaseException], Failure]
Listener = Callable[[Report], None]
Tell = Callable[[str, Fields, Failure | None], None]
"""How a worker's threads report: name, value, failure."""


def logged_failure(where: str) -> FailureOf:
    """Makes failures of a process, and prints each error into its log."""

    def failure(error: BaseException) -> Failure:
        print(printable_traceback(error), file=sys.stderr)
        return Failure.of(error, where)

    return failure


class WarningsToMaster(logging.StreamHandler):
    """Writes warnings to stderr, as Python does where there is no handler,
    and reports the first of each kind."""

    def __init__(self, report: Tell):
        super().__init__()
        self.setLevel(logging.WARNING)
        self._report = report
        self._reported: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        template = str(getattr(record, "template", record.msg))
        if (record.name, template) in self._reported:
            return
        self._reported.add((record.name, template))
        value = {"logger": record.name, "template": template, "text": record.getMessage()[:SHOWN]}
        try:
            self._report(WARNED, value, None)
        except Exception:
            self.handleError(record)


def report_warnings(report: Tell) -> None:
    """Report the warnings of this process from now on."""
    logging.getLogger(LOGGER).addHandler(WarningsToMaster(report))


def log_again(report: Report) -> None:
    """Log a warning that another process has reported, as one of this process."""
    logger, template, text = (str(report.value[key]) for key in ("logger", "template", "text"))
    logging.getLogger(logger).warning("%s", text, extra={"template": template})


def pack(message: Message, token: bytes) -> bytes:
    """Raises TypeError for a value that is neither of JSON nor bytes."""
    kind = type(message).__name__.lower()
    return msgpack.packb(
        {"token": token, "kind": kind, **vars(message)}, default=_as_packable, use_bin_type=True
    )


def _as_packable(value: Any) -> Any:
    """What msgpack does not know itself: failures, and numbers of more than 64 bits, such as those
    in the state of a generator of random numbers."""
    if isinstance(value, int):
        return msgpack.ExtType(LARGE_NUMBER, f"{value:x}".encode())
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent in a message: {value!r:.60}")


def _as_number(code: int, data: bytes) -> int:
    if code != LARGE_NUMBER:
        raise ValueError(f"an extension of type {code}")
    return int(data, 16)


def split(message: bytes) -> list[bytes]:
    """A message as frames."""
    return [message[start : start + FRAME] for start in range(0, len(message), FRAME)]


def unpack(
    frames: Sequence[bytes], token: bytes, *expected: type[Message], most: int = LARGEST
) -> Any:
    """The message in frames. Raises ProtocolError if it is not one of the `expected` with our
    token, or has more than `most` bytes."""
    size = sum(map(len, frames))
    if size > most:
        raise ProtocolError(f"a message of {size} bytes; at most {most} are read")
    fields = _authentic(b"".join(frames), token)
    kinds = {cls.__name__.lower(): cls for cls in expected}
    cls = kinds.get(str(fields.pop("kind", None)))
    if cls is None:
        raise ProtocolError(f"not a {' or '.join(kinds)}")
    if fields.get("failure") is not None:
        fields["failure"] = Failure(**_checked(fields["failure"], Failure))
    return cls(**_checked(fields, cls))


def _authentic(message: bytes, token: bytes) -> Fields:
    """The fields of a message, without its token, which must be ours. Raises ProtocolError."""
    try:
        fields = msgpack.unpackb(message, raw=False, strict_map_key=False, ext_hook=_as_number)
    except Exception as error:  # msgpack raises many kinds; all mean the same here
        raise ProtocolError(f"not a message: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("token"), bytes):
        raise ProtocolError("not a message: no token")
    if not hmac.compare_digest(fields.pop("token"), token):
        raise ProtocolError("wrong token")
    return fields


def _checked(fields: Any, cls: type) -> Fields:
    """The fields of a message. Raises ProtocolError if they are not those of its class, as it
    declares them; no number is below 0."""
    types = _types(cls)
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        raise ProtocolError(f"not a {cls.__name__.lower()}: wrong fields")
    for name, value in fields.items():
        is_odd_number = isinstance(value, int) and (isinstance(value, bool) or value < 0)
        if is_odd_number or not isinstance(value, types[name]):
            raise ProtocolError(f"not a {cls.__name__.lower()}: {name} is of the wrong type")
    return fields


@cache
def _types(cls: type) -> Mapping[str, Any]:
    """Field of a message's class → what its values are instances of."""
    return {
        name: dict if get_origin(hint) is dict else hint
        for name, hint in get_type_hints(cls).items()
    }
