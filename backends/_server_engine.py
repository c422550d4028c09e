"""The engine of a role whose responses come from servers: it holds no model, only the servers'
weights as files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.generation import as_batch, check_positions, prompts_with_room, submit_all
from rlcli.api.headway import Headway
from rlcli.api.model import (
    EngineState,
    FinishedResponse,
    GeneratedResponses,
    GenerationEngine,
    GivesParameters,
    HoldsWeights,
    Model,
    ResponseStream,
)
from rlcli.api.token_texts import id_count
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import ModelError, WorkerError
from rlcli.owned_folder import OwnedFolder

from ._routing_replay import RoutedLayers
from ._saving import SavingRanks, describe, save_model
from ._server_answers import Sampling
from ._server_pool import Served, Servers
from ._server_process import Server
from ._server_response import Requests, Response
from ._server_stream import ServerStream
from ._server_weights import WeightFolder

CONTINUATIONS = 100
"""How many times the rest of one response is requested again, in addition to once per token."""


class ServerEngine(HoldsWeights, GenerationEngine):
    """Generates, and follows another role. Every rank of the role has its own servers."""

    def __init__(
        self,
        model: Model,
        weights: WeightFolder,
        servers: Servers,
        folder: OwnedFolder,
        most_at_once: int,
        on_pause: str,
    ):
        self.role = model.name
        self._weights = weights
        self._servers = servers
        self._folder = folder
        self._most_at_once = most_at_once
        self._on_pause = on_pause
        ids = weights.model.config.vocab_size
        self._ids = ids, min(ids, id_count(model.tokenizer) if model.tokenizer is not None else ids)
        """Rows of the embedding matrix, and which of them is the first that only pads it."""
        self._mesh = model.device_mesh
        self._save_dtype = model.save_dtype or model.required_source.dtype
        self._push()

    @property
    def dp_size(self) -> int:
        return int(self._mesh["dp"].size()) if self._mesh is not None else 1

    # -- generation --------------------------------------------------------------------------------

    def generate(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> GeneratedResponses:
        prompts = prompts_with_room(input_, gconfig, self._check_length)
        finished: dict[int, FinishedResponse] = {}
        with self._open(tokenizer, gconfig, continues=False) as stream:
            numbers = submit_all(stream, prompts, seeds)
            work = Headway(len(numbers), "responses")
            while len(finished) < len(numbers):
                collected = stream.collect()
                finished |= {response.number: response for response in collected}
                work.advance(len(collected))
        return as_batch([finished[number] for number in numbers], gconfig.routing_replay)

    def measured(self) -> dict[str, tuple[float, int]]:
        return self._servers.measured()

    @property
    def weights_number(self) -> int:
        return self._weights.number

    def open(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, longest_prompt: int
    ) -> ResponseStream:
        self._check_length(longest_prompt + gconfig.max_new_tokens)
        return self._open(tokenizer, gconfig, continues=True)

    def _open(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, continues: bool
    ) -> ServerStream:
        """`continues`: a response that is taken from a slow server is continued elsewhere.
        Otherwise it is sampled again from its beginning, with its seed: then it is the same, by
        whichever servers it was sampled."""
        sampling = Sampling.of(self._servers.dialect, gconfig, tokenizer, *self._ids)
        if gconfig.routing_replay:
            routed = RoutedLayers.of(self._weights.model, self.role)
            sampling = replace(sampling, routed=routed)
        self._servers.restore()
        at_once = min(self._most_at_once, gconfig.max_concurrent_responses)
        respond = partial(self._respond, sampling, gconfig.max_new_tokens, continues)
        return ServerStream(
            self._servers,
            respond,
            lambda prompt: self._check_length(prompt + gconfig.max_new_tokens),
            at_once,
            self._on_pause,
            continues,
        )

    def _respond(
        self,
        sampling: Sampling,
        limit: int,
        continues: bool,
        prompt: list[int],
        seed: int,
        stop: threading.Event,
        asked: float,
    ) -> Response:
        """A whole response, in as many pieces as servers return; `asked`: when it was submitted."""
        response, requests = Response(sampling), Requests(sampling, prompt, limit, seed)
        for _ in range(limit + CONTINUATIONS):
            pauses = self._servers.pauses
            served = self._servers.generate(requests.next(response), sampling, stop, asked)
            asked = time.monotonic()
            if served is None:  # no longer wanted
                response.is_aborted = True
                return response
            is_unwanted = served.answer.is_aborted and stop.is_set()
            is_paused = self._servers.dialect.PAUSING_ABORTS and self._servers.pauses > pauses
            self._check(served, sampling, is_expected=is_unwanted or is_paused)
            if served.was_taken:
                requests.taken_at = self._servers.updates
                if served.answer.is_aborted and not continues and not is_unwanted:
                    continue
            response.add(served.answer, partial(self._number_of, server=served.server))
            requests.pieces += 1
            response.is_aborted = is_unwanted
            if len(response.tokens) == limit or response.has_ended or response.is_aborted:
                return response
        raise self._without_end(sampling)

    def _without_end(self, sampling: Sampling) -> ModelError:
        message = (
            f"role {self.role} keeps sampling ids from {sampling.tokens} on, for which its "
            "tokenizer has no tokens"
        )
        return ModelError(message, hint="is the tokenizer that of the model?")

    def _check(self, served: Served, sampling: Sampling, is_expected: bool) -> None:
        """`is_expected`: whether the response may have ended because it was paused, or is no longer
        wanted. Raises WorkerError, ModelError."""
        server, answer = served.server, served.answer
        if sampling.routed is not None and answer.tokens and answer.experts is None:
            raise self._without_experts(server)
        if answer.is_aborted and not (is_expected or served.was_taken):
            raise WorkerError(
                f"{server.name} ended a response at another client's request", code="F90"
            )

    def _without_experts(self, server: Server) -> ModelError:
        message = f"{server.name} does not report the experts of tokens, as routing_replay needs"
        option = f"models.{self.role}.backend.args.options.enable_return_routed_experts=true"
        return ModelError(message, hint=f"start it with {option}", code="F93")

    def _number_of(self, label: str, server: Server) -> int:
        number = self._servers.number(label)
        if number is None:
            message = f"{server.name} sampled with weights from another client ({label[:40]!r})"
            raise WorkerError(message, hint="a server belongs to one run", code="F92")
        return number

    def _check_length(self, longest: int) -> None:
        """Check the length of a prompt and its response. Raises ModelError."""
        check_positions(self.role, longest, self._weights.model.config)

    # -- weights -----------------------------------------------------------------------------------

    def take_parameters(self, source: GivesParameters, eta: float) -> None:
        self.receive_parameters(source, eta)()

    def receive_parameters(self, source: GivesParameters, eta: float) -> Callable[[], None]:
        use = self._weights.receive(source, eta)

        def take() -> None:
            use()
            self._push()

        return take

    def weight_blocks(self) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
        return self._weights.blocks()

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.parameters()

    def offload(self) -> None:
        """Have servers release the memory of their devices until the next call,
        or the next weights."""
        self._servers.release()

    def _push(self) -> None:
        self._servers.update(self._weights.folder, self._weights.number)
        self._weights.remove_old()

    # -- saving ------------------------------------------------------------------------------------

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        return EngineState(self._weights.copies(), is_copy=True)

    def state_was_filled(self, state: EngineState) -> None:
        self._weights.fill(
            {
                name: tensor
                for name, tensor in state.weights.items()
                if isinstance(tensor, torch.Tensor)
            }
        )
        self._push()

    def save_description(self, tokenizer: Any, folder: str) -> None:
        describe(self._weights.model, torch.float32, tokenizer, folder)

    def save_to_hf(self, tokenizer: Any, save_dir: str) -> None:
        leads = self._mesh is None or not any(self._mesh.get_coordinate())
        ranks = SavingRanks(
            leads, self._mesh.get_all_groups() if self._mesh is not None else (), self.device
        )
        model = self._weights.model
        save_model(
            model, self.whole_parameters(), tokenizer, Path(save_dir), self._save_dtype, ranks
        )

    def close(self) -> None:
        self._servers.close()
        self._folder.close()
