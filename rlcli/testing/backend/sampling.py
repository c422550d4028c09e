"""Sampling: which tokens can be drawn, and how often, is what ten lines of numpy say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import ForwardEngine, GeneratedResponses, GenerationEngine
from rlcli.errors import ModelError
from rlcli.registry import load_declared
from rlcli.testing.backend.base import BackendChecks, source_of
from rlcli.testing.backend.differences import require_close
from rlcli.testing.backend.samples import prompts
from rlcli.testing.contract import Violation
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model

NEW_TOKENS = 3
STOP = 7
ODDS = {END: 0.4, STOP: 0.2, 30: 0.15, 3: 0.12, 41: 0.08, 19: 0.05, 60: 0.04}
"""Tokens of the model, and how likely they are relative to each other; the tokenizer does not have
the last one. All others are IMPOSSIBLE."""
IMPOSSIBLE = 1e-13
RARE = 1e-9
"""A token of a smaller probability is not drawn."""
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "top_k 3": {"top_k": 3},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9 at temperature 0.7": {"top_p": 0.9, "temperature": 0.7},
    "top_k 1": {"top_k": 1},
    "greedy at temperature 0.7": {"greedy": True, "temperature": 0.7},
    "top_p 1e-6": {"top_p": 1e-6},
    "a stop token": {"stop_token_ids": (STOP,)},
    "min_new_tokens 2": {"min_new_tokens": 2},
    "min_new_tokens 2, top_k 3, top_p 0.9": {"min_new_tokens": 2, "top_k": 3, "top_p": 0.9},
}
"""With each the same tokens are left whether top_k and top_p count those that are left out by each
other, or by the tokenizer, or not."""
DEVIATIONS = 5
"""Standard deviations by which a number of draws may be off."""
CAUSE = (
    "of the tokens that may be drawn keep the top_k likeliest, of these the fewest that hold "
    "top_p, and draw from the rest, with a new random number for each token"
)


class SamplingChecks(BackendChecks):
    """The tokens of `generate`, from a model that has the same distribution at every place."""

    draws: ClassVar[int] = 100
    """Responses to each prompt."""

    def test_tokens_are_drawn_as_settings_say(self) -> None:
        """every token has its share of the draws, and others have none"""
        lm = memoryless(self.families[0])
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([[END]])).logits[0, -1].double()
        engine = self.generating_engine(lm=lm, tokenizer=ShortTokenizer())
        where = source_of(engine, "generate")
        for title, settings in SETTINGS.items():
            gconfig = GenerationHyperparameters(
                max_new_tokens=NEW_TOKENS, responses_per_prompt=self.draws, **settings
            )
            drawn = generate_unless_refused(engine, gconfig)
            if drawn is None:
                continue
            finding = self._difference(drawn, logits.numpy(), gconfig)
            if finding is not None:
                raise Violation(f"with {title}, {finding}", CAUSE, where)
            require_close(
                f"log-probs of tokens sampled with {title}",
                torch.cat(drawn.logprobs).double(),
                (logits / gconfig.temperature).log_softmax(-1)[torch.cat(drawn.tokens)],
                self.tolerance,
                "report those of all ids at the temperature, whatever is forbidden or left out",
                where,
            )

    def _difference(
        self, drawn: GeneratedResponses, logits: np.ndarray, gconfig: GenerationHyperparameters
    ) -> str | None:
        """From what numpy says of responses sampled from `logits` [V]; None if there is none."""
        ends = [END, *gconfig.stop_token_ids]
        if (finding := wrong_end(drawn, ends)) is not None:
            return finding
        draws = Draws.of(drawn, self._numbers(len(drawn.tokens)))
        previous = np.eye(VOCABULARY)[0]
        for position in range(NEW_TOKENS):
            probs = shares(logits, gconfig, position < gconfig.min_new_tokens)
            if (finding := draws.difference(position, probs, previous)) is not None:
                return f"token {position} {finding}"
            previous = continuing(probs, ends)
        return None

    def _numbers(self, responses: int) -> np.ndarray | None:
        """[N, tokens]: what responses of the seeds 0 to N - 1 are drawn with, if it is declared."""
        uniforms = load_declared("backends", self.name, "UNIFORMS")
        if uniforms is None:
            return None
        return torch.stack([uniforms(seed, NEW_TOKENS) for seed in range(responses)]).numpy()


def generate_unless_refused(
    engine: GenerationEngine, gconfig: GenerationHyperparameters
) -> GeneratedResponses | None:
    """None for an engine whose logits are not its own, and which refuses settings under which its
    log-probs would be others."""
    sample = prompts()
    seeds = range(sample.bs * gconfig.responses_per_prompt)
    try:
        return engine.generate(sample, TinyTokenizer(), gconfig, seeds)
    except ModelError as error:
        if error.code != "F93" or isinstance(engine, ForwardEngine):
            raise
        return None


# -- what is drawn ---------------------------------------------------------------------------------


class ShortTokenizer(TinyTokenizer):
    """Tokenizer of a model with a padded embedding matrix."""

    def __len__(self) -> int:
        return VOCABULARY // 2


@torch.no_grad()
def memoryless(family: str) -> nn.Module:
    """A model whose distribution is that of `ODDS` after any tokens: they have one embedding, so
    that attention averages equal values."""
    lm: Any = tiny_model(family, tie_word_embeddings=False)
    for table in lm.modules():
        if isinstance(table, nn.Embedding):
            table.weight.copy_(table.weight[:1].repeat(len(table.weight), 1))
    hidden = lm.base_model(input_ids=torch.tensor([[END]])).last_hidden_state[0, -1]
    odds = torch.full((VOCABULARY,), IMPOSSIBLE)
    odds[list(ODDS)] = torch.tensor(list(ODDS.values()))
    head = lm.get_output_embeddings().weight
    head.copy_(torch.outer(odds.log(), hidden / hidden.square().sum()))
    return lm


def shares(logits: np.ndarray, gconfig: GenerationHyperparameters, is_early: bool) -> np.ndarray:
    """[V]: the probability with which each token is drawn; `is_early`: before min_new_tokens."""
    probs = np.exp((logits - logits.max()) / gconfig.temperature)
    probs[len(ShortTokenizer()) :] = 0
    if is_early:
        probs[END] = 0
    order = np.argsort(-probs)
    if top_k := 1 if gconfig.greedy else gconfig.top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    likelier = probs[order].cumsum() - probs[order]
    probs[order[likelier >= gconfig.top_p]] = 0
    return probs / probs.sum()


def continuing(probs: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """[V]: the probabilities of tokens that do not end a response; zeros if all do."""
    rest = probs.copy()
    rest[ends] = 0
    return rest / max(rest.sum(), RARE)


@dataclass(frozen=True)
class Draws:
    """The tokens of responses, and the random numbers for them, [N, tokens] each."""

    tokens: np.ndarray
    """-1 after the end of a response."""
    numbers: np.ndarray | None

    @classmethod
    def of(cls, drawn: GeneratedResponses, numbers: np.ndarray | None) -> Draws:
        rows = [
            nn.functional.pad(row, (0, NEW_TOKENS - len(row)), value=-1) for row in drawn.tokens
        ]
        return cls(torch.stack(rows).numpy(), numbers)

    def difference(self, position: int, probs: np.ndarray, of_previous: np.ndarray) -> str | None:
        """How the tokens at a position differ from draws with the probabilities `probs`; those of
        the tokens before them are `of_previous`, [V] each."""
        rows = self.tokens[:, position] >= 0
        tokens = self.tokens[rows, position]
        previous = self.tokens[rows, position - 1] if position else np.zeros_like(tokens)
        finding = impossible(tokens, probs) or unlike(tokens, previous, probs, of_previous)
        if finding is None and self.numbers is not None and len(tokens):
            return unrelated(tokens, self.numbers[rows, position], probs)
        return finding


# -- differences -----------------------------------------------------------------------------------


def wrong_end(drawn: GeneratedResponses, ends: Sequence[int]) -> str | None:
    """A response that does not end with its first end token, or at the limit."""
    for tokens, ended in zip(drawn.tokens, drawn.ended.tolist(), strict=True):
        closing = [token in ends for token in tokens.tolist()]
        length = closing.index(True) + 1 if any(closing) else NEW_TOKENS
        if len(closing) != length or ended != any(closing):
            return f"a response is {tokens.tolist()}, and ended is {ended}"
    return None


def impossible(tokens: np.ndarray, probs: np.ndarray) -> str | None:
    """Tokens among those drawn, [n], that have no probability [V]."""
    reachable = np.flatnonzero(probs > RARE)
    strays = np.setdiff1d(tokens, reachable)
    if not len(strays):
        return None
    return f"is {strays.tolist()} in some responses; only {reachable.tolist()} can be drawn"


def unlike(
    tokens: np.ndarray, previous: np.ndarray, probs: np.ndarray, of_previous: np.ndarray
) -> str | None:
    """How numbers of pairs of a token and the previous one, [n] each, differ by more than chance
    from those of draws with these probabilities, [V] each."""
    expected = np.outer(of_previous, probs) * len(tokens)
    actual = np.bincount(previous * VOCABULARY + tokens, minlength=expected.size)
    actual = actual.reshape(expected.shape)
    deviations = np.abs(actual - expected) / (np.sqrt(expected) + 1)
    pair = np.unravel_index(deviations.argmax(), deviations.shape)
    if deviations[pair] <= DEVIATIONS:
        return None
    after = f" after {pair[0]}" if previous.any() else ""
    numbers = f"in {actual[pair]} of {len(tokens)} responses, not in {expected[pair]:.0f}"
    return f"is {pair[1]}{after} {numbers}"


def unrelated(tokens: np.ndarray, numbers: np.ndarray, probs: np.ndarray) -> str | None:
    """How tokens differ from those for which the random `numbers` stand, [n] each, if every token
    has an interval of the length of its probability [V]: by more than two numbers are apart."""
    order = np.argsort(numbers)
    tokens, numbers = tokens[order], numbers[order]
    middles = (numbers[1:] + numbers[:-1]) / 2
    lengths = np.diff(middles, prepend=0.0, append=1.0)
    actual = np.bincount(tokens, lengths, VOCABULARY)
    token = np.abs(actual - probs).argmax()
    if np.abs(actual - probs)[token] > np.diff(numbers, prepend=0.0, append=1.0).max():
        return (
            f"is {token} for {actual[token]:.4f} of the random numbers, not for {probs[token]:.4f}"
        )
    if np.count_nonzero(np.diff(tokens)) >= len(np.unique(tokens)):
        return "is drawn from several intervals of random numbers per token"
    return None
