"""A model of ours as lm-eval's tasks ask it. Imported only where lm-eval is needed:
it is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from rlcli.api.chat_template import conversation_text
from rlcli.api.config import GenerationHyperparameters, MicroBatchSpec, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import PROMPTS, SEQUENCES
from rlcli.api.model import Model, ModelOutput
from rlcli.api.special_tokens import MARK, tokens_of
from rlcli.errors import ModelError

TOKENS_AT_ONCE = 2048
"""Tokens of a scoring forward pass: all their logits are in memory,
to know which token is the likeliest."""
LONGEST = 4096
"""Tokens of a text if the model has no limit."""
LONGEST_ANSWER = 256
"""Tokens of an answer if a task sets no limit, as elsewhere in lm-eval."""

Scored = tuple[float, bool]
"""Log-likelihood of a continuation, and whether each of its tokens is the likeliest."""


class EngineLM(TemplateLM):
    """Scores and generates with a model's engine. Texts are encoded as by lm-eval's own class for
    transformers."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.tokenizer: Any = model.tokenizer
        self.model.module.eval()
        self.max_length: int = (
            getattr(model.source and model.source.config, "max_position_embeddings", None)
            or LONGEST
        )

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return str(self.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return conversation_text(
            self.tokenizer, chat_history, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **others: Any
    ) -> list[int]:
        if add_special_tokens is None and string.startswith(
            self.tokenizer.decode([self.prefix_token_id])
        ):
            add_special_tokens = False  # a chat template has already written it
        chosen: dict[str, Any] = (
            {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        )
        first, _, rest = string.partition(MARK)
        return [*self.tokenizer.encode(first, **chosen), *tokens_of(self.tokenizer, [rest])[0]]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts; those longer than the model's limit are cut into
        windows."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            pairs = utils.get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            )
            mine = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            windows += mine
            owners += [number] * len(mine)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **others: Any
    ) -> list[Scored]:
        """Scores of (anything, context tokens, continuation tokens); a context that is too long
        loses its beginning."""
        if not requests:
            return []
        longest = self.max_length + 1  # the last token is only predicted
        texts = [(context + continuation)[-longest:] for _, context, continuation in requests]
        answers: list[Scored] = []
        for scores, (_, _, continuation) in zip(self._token_scores(texts), requests, strict=True):
            logprobs, likeliest = scores[max(0, len(scores) - len(continuation)) :].unbind(-1)
            answers.append((float(logprobs.sum()), bool(likeliest.all())))
        return answers

    def _token_scores(self, texts: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        """[T - 1, 2] for each text of T tokens: see `_scores`."""
        lengths = [len(text) for text in texts]
        spec = MicroBatchSpec(max_tokens_per_mb=max(TOKENS_AT_ONCE, *lengths))
        batch = _packed(SEQUENCES, texts)
        scores = self.model.module.forward(
            batch, spec, _scores, [[length - 1] for length in lengths]
        )
        return scores.cpu().split([length - 1 for length in lengths])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The model's continuation of each context,
        up to the first of the task's stop sequences."""
        answers: list[str] = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in by_settings.values():
            contexts, settings = (
                [requests[number].args[0] for number in numbers],
                requests[numbers[0]].args[1],
            )
            for number, text in zip(numbers, self._generate(contexts, settings), strict=True):
                answers[number] = text
        return answers

    def _generate(self, contexts: Sequence[str], task: dict[str, Any]) -> list[str]:
        settings: dict[str, Any] = normalize_gen_kwargs(task, LONGEST_ANSWER)
        sampling = _sampling(settings)
        room = self.max_length - sampling.max_new_tokens
        if room <= 0:
            raise ModelError(
                f"a task asks for {sampling.max_new_tokens} new tokens; "
                f"the model has {self.max_length} positions"
            )
        prompts = [self.tok_encode(text)[-room:] or [self.prefix_token_id] for text in contexts]
        batch = _packed(PROMPTS, prompts)
        seeds = [stable_seed(self.model.seed, text, number) for number, text in enumerate(contexts)]
        generated = self.model.module.generate(batch, self.tokenizer, sampling, seeds)
        stops = handle_stop_sequences(
            settings.get("until"), eos=self.tokenizer.decode([self.eot_token_id])
        )
        return [
            _until(self.tokenizer.decode(tokens, skip_special_tokens=True), stops)
            for tokens in generated.tokens
        ]


def _sampling(settings: dict[str, Any]) -> GenerationHyperparameters:
    """How a task samples, from its settings in lm-eval's names."""
    temperature = float(settings.get("temperature") or 0.0)
    return GenerationHyperparameters(
        max_new_tokens=int(settings["max_gen_toks"]),
        greedy=not temperature,
        temperature=temperature or 1.0,
        top_p=float(settings.get("top_p", 1.0)),
        top_k=int(settings.get("top_k", 0)),
    )


def _packed(key: str, texts: Sequence[Sequence[int]]) -> SequenceSample:
    """Texts as a batch, which has their tokens under this key."""
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    return SequenceSample.from_default(
        ids=list(range(len(texts))), seqlens=list(map(len, texts)), data={key: tokens}
    )


def _scores(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
    """[T - N, 2]: the log-prob of each token but the first of a sequence, and whether it is the
    likeliest (1 or 0)."""
    lengths = batch.flat_seqlens(SEQUENCES)
    likeliest, tokens = (
        output.logits.argmax(-1).split(lengths),
        batch.data[SEQUENCES].split(lengths),
    )
    hits = [theirs[:-1] == ours[1:] for theirs, ours in zip(likeliest, tokens, strict=True)]
    return torch.stack([output.logprobs, torch.cat(hits).to(output.logprobs)], dim=-1)


def _until(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop sequences, excluding it."""
    return text[
        : min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))
    ]
