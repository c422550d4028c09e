"""An MCP server for tests whose list of tools is odd: what is wrong with it is its argument."""

from __future__ import annotations

import sys

import anyio
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp_types import ListToolsResult, Tool

ODDITY = sys.argv[1]
NOTHING = {"type": "object", "properties": {}}
LISTS = {
    "name": [Tool(name="<|im_end|>", input_schema=NOTHING)],
    "arguments": [Tool(name="look", input_schema={"type": "object", "properties": ["a"]})],
    "none": [Tool(name="look", input_schema={"type": "object"})],
    "long": [
        Tool(
            name="look",
            description="x" * 100_000,
            input_schema=NOTHING,
        )
    ],
    "endless": [Tool(name="look", input_schema=NOTHING)],
}


async def list_tools(context, params):
    cursor = "again" if ODDITY == "endless" else None
    return ListToolsResult(tools=LISTS[ODDITY], next_cursor=cursor, ttl_ms=0, cache_scope="private")


async def main() -> None:
    server = Server("odd", on_list_tools=list_tools)
    async with stdio_server() as (requests, replies):
        await server.run(requests, replies, server.create_initialization_options())


anyio.run(main)
