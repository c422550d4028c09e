"""MCP: the tools of any server that speaks the Model Context Protocol."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TextIO, TypeVar

from rlcli.api.environment import (
    Environment,
    EnvironmentFailure,
    described,
    register_environment,
)
from rlcli.api.limits import Alternatives, alternatives_problem
from rlcli.api.tool_schema import Schema

from ._token import check_way_of_token, token_headers

LONGEST = 1 << 16
"""Characters of what a tool returns."""
MOST_PAGES = 100
"""Of the list of tools."""
LAST_WORDS = 300
"""Characters of what a server wrote to its standard error, in the message about its failure."""

OF_THE_CONNECTION = (
    "CONNECTION_CLOSED",
    "INVALID_REQUEST",
    "METHOD_NOT_FOUND",
    "PARSE_ERROR",
    "REQUEST_TIMEOUT",
)
"""Names of the protocol's errors that do not come from a tool."""

T = TypeVar("T")


class ToolError(Exception):
    """What a server says is wrong with a call."""


@dataclass(kw_only=True)
class Mcp(Environment):
    """Calls the tools of an MCP server. A server that it starts, `command`, lives as long as the
    episode; one that runs already, `url`, has a session for each episode.

    A server knows no rows and does not score: an episode begins with its row's prompt, and a call
    of the graph compares the answer.
    """

    REQUIRES: ClassVar[tuple[str, ...]] = ("mcp>=2,<3",)
    PRELOAD: ClassVar[tuple[str, ...]] = ("mcp",)
    NETWORK: ClassVar[bool] = True
    ONE_OF: ClassVar[Alternatives] = ("command", "url")
    VARIABLES: ClassVar[tuple[str, ...]] = ("token_variable",)
    NO_EFFECT_ON_NUMBERS: ClassVar[tuple[str, ...]] = ("tools",)  # on episodes that call these

    command: list[str] | None = None
    """Program and arguments that start a server, which talks through its standard input and
    output. Environment variables that it needs are named in `variables`."""

    url: str | None = None
    """Address of a server that runs already, such as http://127.0.0.1:8000/mcp."""

    tools: list[str] | None = None
    """Names of the server's tools that the policy may call; null: all."""

    token_variable: str | None = None
    """Environment variable with the token for `url`."""

    _session: _Session | None = field(init=False, repr=False, default=None)
    _schemas: list[Schema] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        values = {"command": self.command, "url": self.url}
        if problem := alternatives_problem(self.ONE_OF, values):
            raise ValueError(f"{problem}: the program of a server, or its address")
        if self.token_variable and not self.url:
            raise ValueError("token_variable is for url; name what command needs in variables")
        check_way_of_token(self.url or "", self.token_variable)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._connected()

    def tool_schemas(self) -> list[Schema]:
        if self._schemas is None:
            tools = self._connected().tools()
            if missing := set(self.tools or ()) - tools.keys():
                has = ", ".join(tools)
                raise EnvironmentFailure(f"the server has no tool {missing.pop()}, but {has}")
            self._schemas = [_schema(tools[name]) for name in self.tools or tools]
        return self._schemas

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._connected().call_tool(name, _encodable(arguments))

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _connected(self) -> _Session:
        if self._session is None:
            self._session = _Session(self._transport)
        return self._session

    def _transport(self, errors: TextIO) -> AbstractAsyncContextManager[Any]:
        """The way to the server, which may write to the file `errors`."""
        from mcp.client.stdio import StdioServerParameters, stdio_client

        if self.command:
            program, *arguments = self.command
            server = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
            return stdio_client(server, errors)
        assert self.url is not None
        return _through_http(self.url, token_headers(self.token_variable))


@asynccontextmanager
async def _through_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """The way to a server at an address."""
    from httpx2 import AsyncClient
    from mcp.client.streamable_http import streamable_http_client

    hooks = {"response": [_refuse_failure]}
    async with (
        # a call has the limit of `call_seconds`
        AsyncClient(
            headers=headers, follow_redirects=True, timeout=None, event_hooks=hooks
        ) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


class _Session:
    """A session with a server, whose event loop runs in a thread."""

    def __init__(self, transport: Callable[[TextIO], AbstractAsyncContextManager[Any]]):
        """Raises EnvironmentFailure if there is no server."""
        from anyio.from_thread import start_blocking_portal
        from mcp import Client

        with ExitStack() as stack:
            self._errors = stack.enter_context(tempfile.TemporaryFile("a+", errors="replace"))
            self._portal = stack.enter_context(start_blocking_portal(name="MCP"))
            client = Client(transport(self._errors), cache=None)
            try:
                context = self._portal.wrap_async_context_manager(client)
                self._client = stack.enter_context(context)
            except Exception as error:
                raise self._failure(error) from error
            self._stack = stack.pop_all()

    def close(self) -> None:
        with suppress(Exception):  # the server is gone
            self._stack.close()

    def tools(self) -> dict[str, Any]:
        """The tools of the server, by their names. Raises EnvironmentFailure."""
        tools: dict[str, Any] = {}
        cursor = None
        for _ in range(MOST_PAGES):
            try:
                page = self._wait(partial(self._client.list_tools, cursor=cursor))
            except Exception as error:
                raise self._failure(error) from error
            tools |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise EnvironmentFailure(f"the list of tools does not end after {MOST_PAGES} pages")

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool returns, as a text. Raises ToolError if the server says that it failed,
        EnvironmentFailure if the server does not answer."""
        import mcp_types
        from mcp import MCPError

        try:
            result = self._wait(partial(self._client.call_tool, name, arguments))
        except MCPError as error:
            if error.code in (getattr(mcp_types, name) for name in OF_THE_CONNECTION):
                raise self._failure(error) from error
            raise ToolError(error.message[:LONGEST]) from error
        except Exception as error:
            raise self._failure(error) from error
        text = "\n".join(map(_as_text, result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text[:LONGEST])
        return text[:LONGEST]

    def _wait(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call, which is cancelled if this is interrupted."""
        answer = self._portal.start_task_soon(call)
        try:
            return answer.result()
        finally:
            answer.cancel()

    def _failure(self, error: BaseException) -> EnvironmentFailure:
        """Why the server does not answer, with its last words."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - LAST_WORDS))
        words = self._errors.read().strip()
        reason = f"the MCP server failed: {described(error)}"
        return EnvironmentFailure(f"{reason}; it wrote: {words}" if words else reason)


async def _refuse_failure(response: Any) -> None:
    """Raise an exception for an answer of something that is not the server, such as a gateway that
    cannot reach it: the SDK takes it for one of the tool."""
    is_of_protocol = response.status_code in (404, 405)
    is_answer = "json" in response.headers.get("content-type", "")
    if response.is_error and not is_of_protocol and not is_answer:
        response.raise_for_status()


def _schema(tool: Any) -> Schema:
    function = {
        "name": tool.name,
        "description": tool.description or tool.title or "",
        "parameters": {"properties": {}, **tool.input_schema},
    }
    return {"type": "function", "function": function}


def _as_text(block: Any) -> str:
    """What a policy reads of a part of a result: a text, or what there is instead of one."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[{block.uri}]"
    resource = getattr(block, "resource", block)
    return getattr(resource, "text", None) or f"[{resource.mime_type or block.type}]"


def _encodable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without halves of characters, which break the connection."""
    text = json.dumps(dict(arguments), ensure_ascii=False)
    encoded: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
    return encoded


register_environment("mcp", Mcp)
