"""An episode of verifiers, of which the policy is the model: every request waits for its turn."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import verifiers.v1 as vf
from aiohttp import ClientSession, ClientTimeout, web
from anyio.from_thread import start_blocking_portal
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

__all__ = ["ChatHarness"]

HARNESS = "rlcli_chat"
"""The name by which verifiers finds ChatHarness."""
NO_KEY = "RLCLI_NO_KEY"
"""Environment variable with the key of the policy, which has none."""
FULL = "context_length_exceeded"
"""Code of the answer to a request after which the policy takes no turn."""

Message = dict[str, Any]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat with the tools of the task, and no others, in the process of the episode."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        messages = self._opening(data)
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            AsyncExitStack() as stack,
            ClientSession(headers=headers, timeout=ClientTimeout(None)) as session,
        ):
            tools, names, connected = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while (message := await _completion(session, endpoint, body)) is not None:
                messages.append(message)
                calls = message.get("tool_calls") or []
                for call in calls:
                    messages.append(await _result(call, names, connected))
                if not calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: Any) -> list[Message]:
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *map(message_to_wire, prompt or ())]


async def _completion(session: ClientSession, endpoint: str, body: Message) -> Message | None:
    """The policy's turn; None: it takes no other. Raises RuntimeError if the task refuses one."""
    async with session.post(f"{endpoint}/chat/completions", json=body) as response:
        text = await response.text()
    if response.ok:
        message: Message = json.loads(text)["choices"][0]["message"]
        return message
    if FULL in text:
        return None
    raise RuntimeError(f"the request of a turn was refused: {text}")


async def _result(call: Message, names: Any, connected: Any) -> Message:
    """The message of a tool that was called."""
    name = call["function"]["name"]
    arguments = json.loads(call["function"]["arguments"])
    content = await call_mcp(connected, names, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


async def _start_in_temporary_folder(runtime: Any) -> None:
    """Give an agent a folder, which it removes in the end. Otherwise all are in the user's home."""
    runtime.workdir = Path(tempfile.mkdtemp(prefix="verifiers-"))
    runtime.info.id = str(runtime.workdir)


SubprocessRuntime.start = _start_in_temporary_folder


@dataclass(frozen=True)
class TurnRequest:
    """What a rollout asks of the policy."""

    messages: list[Message]
    """All so far."""
    tools: list[Message]
    """Their JSON schemas."""
    answer: asyncio.Future[Message | None]


class TaskRollout:
    """An episode, in a thread. It asks for turns until it is over."""

    def __init__(self, config: Any, task: Mapping[str, Any] | None):
        """`task`: the data of a task; None: the first of the taskset."""
        self._requests: SimpleQueue[TurnRequest | None] = SimpleQueue()
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal(name="verifiers"))
        self._episode = self._portal.start_task_soon(self._play, config, task)

    def next_request(self) -> TurnRequest | None:
        """The next turn that it asks for; None: it is over. Waits for it."""
        return self._requests.get()

    def answer(self, request: TurnRequest, message: Message | None) -> None:
        """Have it read the policy's turn; None: the policy takes no other."""
        self._portal.call(request.answer.set_result, message)

    def episode(self) -> Any:
        """What verifiers has recorded of it. Raises what it has ended with."""
        return self._episode.result()

    def close(self) -> None:
        self._episode.cancel()
        with suppress(Exception):
            self._stack.close()

    async def _play(self, config: Any, data: Mapping[str, Any] | None) -> Any:
        try:
            environment = vf.load_environment(config)
            task = _task(environment, data)
            async with self._policy() as address, environment.serving():
                client = vf.EvalClientConfig(base_url=address, api_key_var=NO_KEY)
                context = vf.ModelContext(model="policy", client=client)
                return await environment.run_episode(task, context)
        finally:
            self._requests.put(None)

    @asynccontextmanager
    async def _policy(self) -> AsyncIterator[str]:
        """The address at which the policy answers, known to this process only."""
        path = f"/{secrets.token_urlsafe()}"
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post(f"{path}/chat/completions", self._complete)
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        finally:
            await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        answer: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._requests.put(TurnRequest(body["messages"], body.get("tools") or [], answer))
        message = await answer
        if message is None:
            error = {"code": FULL, "message": f"{FULL}: the episode ends here"}
            return web.json_response({"error": error}, status=400)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        completion = {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response(completion | {"choices": [choice]})


def _task(environment: Any, data: Mapping[str, Any] | None) -> Any:
    if data is None:
        return next(iter(environment.taskset))
    task_type = type(environment.taskset).task_type()
    return task_type(task_type.data_type().model_validate(data), environment.config.taskset.task)


def configured(taskset: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """The configuration of an environment whose agents chat, and have no sandboxes, unless it says
    otherwise. Raises ValueError if verifiers refuses it."""
    sys.modules[HARNESS] = sys.modules[__name__]
    config_type = vf.env_config_type(taskset["id"], settings.get("id", ""))
    brings_harness = vf.default_harness_id(taskset["id"]) == taskset["id"]
    config = {**settings, "taskset": taskset}
    for name, field in config_type.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            declared = field.default.model_fields_set | ({"harness"} if brings_harness else set())
            usual = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
            role = {key: value for key, value in usual.items() if key not in declared}
            config[name] = role | settings.get(name, {})
    return config_type.model_validate(config)
