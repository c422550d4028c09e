"""One model in this process that answers texts, with the engine that a run would use."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from rlcli.api.config import GenerationHyperparameters, stable_seed
from rlcli.api.key_meaning import PROMPTS
from rlcli.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rlcli.api.data import SequenceSample
    from rlcli.api.model import Model
    from rlcli.recipe.prompt_format import PromptFormat

Message = Mapping[str, str]
"""`{role: user, content: …}`"""


@dataclass(frozen=True)
class GeneratedAnswer:
    """One response."""

    text: str
    tokens: int
    finish: str
    """stop: it ended by itself; length: it was truncated."""
    logprob: float
    """Sum over its tokens, in nats."""


def load_alone(source: str, device: str, seed: int) -> Model:
    """The model of a folder or Hub id with its engine, in this process.
    Raises ModelError, ResourceError."""
    import torch

    from rlcli.checkpoint.huggingface import load_tokenizer
    from rlcli.inspect.cores import available_cores
    from rlcli.runtime.roles import pick_device

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(available_cores())
    return lone_model(source, load_tokenizer(source), pick_device(device, 0), seed, "auto")


def lone_model(
    path: str, tokenizer: PreTrainedTokenizerBase, device: torch.device, seed: int, dtype: str
) -> Model:
    """The model of a folder or Hub id with an engine of its own, not part of any recipe; it is
    measured as a run would be. Raises ModelError."""
    from rlcli import registry
    from rlcli.api.config import ModelBackendAbstraction
    from rlcli.api.default_backends import UNTRAINED
    from rlcli.api.model import Model, ModelBackend
    from rlcli.api.model_source import open_source
    from rlcli.recipe.measured_arguments import fastest

    source = open_source(path, head="lm", tokenizer=tokenizer, seed=seed)
    model = Model(
        name="model", module=None, tokenizer=tokenizer, device=device, seed=seed, source=source
    )
    arguments = {"dtype": dtype}
    backend: ModelBackend = registry.make_backend(ModelBackendAbstraction(UNTRAINED, arguments))
    choices = fastest([{model.name: backend.measure(model)}])
    arguments |= {choice.argument: choice.value for choice in choices}
    backend = registry.make_backend(ModelBackendAbstraction(UNTRAINED, arguments))
    return backend.initialize(model, None)


class Answerer:
    """A model loaded to answer prompts."""

    def __init__(self, source: str, device: str = "auto", seed: int = 1):
        """`source`: a folder or Hub id. Raises ModelError, ResourceError."""
        self.model = load_alone(source, device, seed)
        self.source = source
        self.seed = seed
        self.tokenizer: Any = self.model.tokenizer
        self._engine: Any = self.model.module
        self._engine.eval()

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence that the model reads; None: it has no limit."""
        return getattr(self._engine.lm.config, "max_position_embeddings", None)

    def tokens_of(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's next message begins.
        Raises ModelError."""
        from rlcli.api.chat_template import conversation_tokens

        if not self.chats:
            hint = "rlcli generate continues a text without one"
            raise ModelError(
                f"the tokenizer of {self.source} has no chat template", hint=hint, code="F32"
            )
        return conversation_tokens(
            self.tokenizer, messages, add_generation_prompt=True, day=date.today()
        )

    def check_template(self) -> None:
        """Raise ModelError for a chat template that fails."""
        self.tokens_of([{"role": "user", "content": "?"}])

    def tokens_of_text(self, text: str) -> list[int]:
        """Tokens of a text to be continued, with those that the tokenizer prepends."""
        ids = list(self.tokenizer(text).input_ids)
        return ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids

    def tokens_of_prompt(self, text: str, style: PromptFormat) -> list[int]:
        """Tokens of a prompt in a format; through the chat template if the format has one.
        Raises ModelError."""
        if style.chat is False or not self.chats:
            return self.tokens_of_text(style.text(text))
        system = [] if style.system is None else [{"role": "system", "content": style.system}]
        return self.tokens_of([*system, {"role": "user", "content": style.prompt(text)}])

    def answer(
        self, prompts: Sequence[Sequence[int]], settings: GenerationHyperparameters
    ) -> list[list[GeneratedAnswer]]:
        """The responses to each prompt."""
        group, settings = settings.responses_per_prompt, self._fitting(prompts, settings)
        generated = self._engine.generate(
            _batch(prompts), self.tokenizer, settings, self._seeds(len(prompts), group)
        )
        responses = zip(generated.tokens, generated.logprobs, generated.ended.tolist(), strict=True)
        answers = [
            GeneratedAnswer(
                self._text(tokens.tolist()),
                len(tokens),
                "stop" if ended else "length",
                float(logprobs.sum()),
            )
            for tokens, logprobs, ended in responses
        ]
        return [answers[start : start + group] for start in range(0, len(answers), group)]

    def stream(
        self, prompt: Sequence[int], settings: GenerationHyperparameters, turn: int = 0
    ) -> Generator[str, None, None]:
        """One response in pieces of text as they are sampled;
        another `turn` gives another response to a prompt."""
        settings = self._fitting([prompt], settings)
        shown, read, tokens = 0, 0, list[int]()
        for _, token in self._engine.stream(
            _batch([prompt]), self.tokenizer, settings, self._seeds(1, 1, turn)
        ):
            tokens.append(token)
            # A token may be part of a character, and its text may depend on the token before it.
            before, now = self._text(tokens[shown:read]), self._text(tokens[shown:])
            if len(now) > len(before) and not now.endswith("\ufffd"):
                yield now[len(before) :]
                shown, read = read, len(tokens)
        rest = self._text(tokens[shown:])[len(self._text(tokens[shown:read])) :]
        if rest:
            yield rest

    def _fitting(
        self, prompts: Sequence[Sequence[int]], settings: GenerationHyperparameters
    ) -> GenerationHyperparameters:
        """End responses with any of the model's several end tokens, if it has them, such as the end
        of a turn, and limit them to its positions. The engine refuses a prompt that leaves no
        room."""
        longest = max(map(len, prompts))
        room = self.positions - longest if self.positions else settings.max_new_tokens
        ends = self._engine.lm.generation_config.eos_token_id
        several = ends if isinstance(ends, list) else []
        return replace(
            settings,
            max_new_tokens=max(1, min(room, settings.max_new_tokens)),
            stop_token_ids=(*settings.stop_token_ids, *several),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _seeds(self, prompts: int, group: int, turn: int = 0) -> list[int]:
        return [
            stable_seed(self.seed, turn, prompt, number)
            for prompt in range(prompts)
            for number in range(group)
        ]


def _batch(prompts: Sequence[Sequence[int]]) -> SequenceSample:
    import torch

    from rlcli.api.data import SequenceSample

    return SequenceSample.from_default(
        ids=list(range(len(prompts))),
        seqlens=[len(prompt) for prompt in prompts],
        data={
            PROMPTS: torch.tensor(
                [token for prompt in prompts for token in prompt], dtype=torch.int64
            )
        },
    )
