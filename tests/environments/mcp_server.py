"""An MCP server for tests, on its standard input and output or, after `http`, on a port of this
machine, which it prints."""

from __future__ import annotations

import os
import re
import socket
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import EmbeddedResource, ImageContent, ResourceLink, TextContent
from mcp_types import TextResourceContents as TextResource

server = MCPServer("desk")
notes: list[str] = []


@server.tool()
def calculate(expression: str) -> str:
    """Work out a sum of whole numbers, such as 12+7-3."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}([+-][0-9]{1,9}){0,99}", expression):
        raise ToolError("only sums of whole numbers")
    return str(sum(map(int, re.findall(r"[+-]?[0-9]+", expression))))


@server.tool()
def note(text: str) -> str:
    """Write a note, and read all of them."""
    notes.append(text)
    return "|".join(notes)


@server.tool()
def variable(name: str) -> str:
    """Read an environment variable of the server."""
    return os.environ.get(name, "is not set")


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


@server.tool(structured_output=False)
def look() -> list[TextContent | ImageContent | ResourceLink | EmbeddedResource]:
    """Look at the desk."""
    letter = TextResource(uri="desk://letter", text="Dear policy")
    return [
        TextContent(type="text", text="a desk"),
        ImageContent(type="image", data="", mime_type="image/png"),
        ResourceLink(type="resource_link", name="drawer", uri="desk://drawer"),
        EmbeddedResource(type="resource", resource=letter),
    ]


@server.tool()
def leave() -> str:
    """End the server."""
    print("the desk is closed", file=sys.stderr, flush=True)
    os._exit(3)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    if "http" in sys.argv:
        port = free_port()
        print(port, flush=True)
        server.run("streamable-http", host="127.0.0.1", port=port)
    else:
        server.run("stdio")
