"""Generation: transformers' own greedy answers, a random stream per response, log-probs confirmed
by recomputation."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.model import GeneratedResponses, GenerationEngine, HoldsWeights
from rlcli.testing.backend.base import BackendChecks, offers, source_of
from rlcli.testing.backend.differences import require_close, require_same
from rlcli.testing.backend.forward import plain_scores
from rlcli.testing.backend.objectives import train
from rlcli.testing.backend.plain import greedy_answers, packed, plain_model, sequences
from rlcli.testing.backend.samples import prompts
from rlcli.testing.contract import Violation, skip_unless
from rlcli.testing.saved_models import load_saved
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model

NEW_TOKENS = 12
CONTEXT = (
    "attend to the whole prompt and to all tokens so far, each at its position, and to no padding"
)
STOPS = tuple(range(0, VOCABULARY, 5))
"""Tokens that end responses at different times: of more than fit at once, some join others, and
some move to make room."""


class BackendGenerationChecks(BackendChecks):
    """`generate`, and the weights that it uses."""

    def test_greedy_answers_are_those_of_transformers(self) -> None:
        """greedy: transformers' answers, token for token"""
        for number, family in enumerate(self.families):
            engine = self.generating_engine(family)
            # fewer than prompts, so that slots are refilled: that is the same for all families
            for slots in (2,) if number else (2, 1, 5):
                _require_greedy(
                    engine,
                    plain_model(family),
                    f"{family}, {slots} at a time",
                    CONTEXT,
                    max_concurrent_responses=slots,
                )

    def test_an_answer_depends_on_its_seed_alone(self) -> None:
        """sampling depends on prompt and seed only, not on the batch"""
        engine = self.generating_engine()
        self._require_reproducible()
        where = source_of(engine, "generate")
        together = generate(engine, responses_per_prompt=3).tokens
        again = generate(engine, responses_per_prompt=3).tokens
        in_turn = generate(engine, responses_per_prompt=3, max_concurrent_responses=2).tokens
        third = prompts().select_indices([2])
        alone = generate(engine, third, [6, 7, 8], responses_per_prompt=3).tokens
        cause = "give each response a random stream of its own, seeded by its seed"
        for drawn, expected, occasion in (
            (again, together, "drawn again"),
            (in_turn, together, "drawn two at a time"),
            (alone, together[6:9], "without the other prompts"),
        ):
            require_same("responses", drawn, expected, occasion, cause, where)
        if all(torch.equal(answer, together[0]) for answer in together[:3]):
            raise Violation(
                "three seeds gave one prompt the same response", "draw from the seeds", where
            )

    def test_a_stream_gives_the_same_responses(self) -> None:
        """a stream gives the tokens that generate returns"""
        engine, sample = self.generating_engine(), prompts()
        self._require_reproducible()
        settings = GenerationHyperparameters(
            max_new_tokens=NEW_TOKENS,
            responses_per_prompt=2,
            max_concurrent_responses=3,
            stop_token_ids=STOPS,
        )
        seeds = range(2 * sample.bs)
        pieces: list[list[int]] = [[] for _ in seeds]
        for number, token in engine.stream(sample, TinyTokenizer(), settings, seeds):
            pieces[number].append(token)
        require_same(
            "responses",
            [torch.tensor(tokens) for tokens in pieces],
            engine.generate(sample, TinyTokenizer(), settings, seeds).tokens,
            "as a stream",
            "yield (number of the response, its next token), each once, in the order of "
            "prompts and their groups",
            source_of(engine, "stream"),
        )

    def test_recomputation_confirms_the_log_probs(self) -> None:
        """log-probs are those of a forward pass at the temperature"""
        engine = self.generating_engine()
        drawn = generate(
            engine,
            responses_per_prompt=2,
            temperature=0.7,
            max_concurrent_responses=4,
            stop_token_ids=STOPS,
        )
        plain, requests = exported(engine), [prompt for prompt in asked() for _ in range(2)]
        pairs = zip(requests, drawn.tokens, strict=True)
        expected = [response_scores(plain, *pair, temperature=0.7) for pair in pairs]
        require_close(
            "log-probs of sampled tokens",
            torch.cat(drawn.logprobs),
            torch.cat(expected),
            self.tolerance,
            "report log-probs of the whole distribution at the temperature, before top_p and top_k",
            source_of(engine, "generate"),
        )

    def test_no_prompt_has_no_response(self) -> None:
        """a batch without prompts has no responses"""
        engine = self.generating_engine()
        if generate(engine, prompts().select_indices([]), []).tokens:
            raise Violation(
                "responses without prompts", "return none", source_of(engine, "generate")
            )

    def test_training_reaches_generation(self) -> None:
        """after a step, answers come from the new weights"""
        for recompute in (False, True):
            engine = self.generating_engine(trained=True, lr=0.05, gradient_checkpointing=recompute)
            before = generate(engine, greedy=True).tokens
            train(engine)
            lm = exported(engine)
            if greedy_answers(lm, prompts(), NEW_TOKENS) == [row.tolist() for row in before]:
                raise Violation(
                    "a step at lr 0.05 changed no greedy answer",
                    "apply the update",
                    source_of(engine, "generate"),
                )
            cause = "generate with the weights as they are, not with a copy of those before"
            _require_greedy(engine, lm, "after a training step", cause)

    def test_weights_of_another_engine(self) -> None:
        """take_parameters: mixed by eta, and used at once"""
        for family, eta in product(self.families, (1.0, 0.25)):
            mine, source = self.engine(family, seed=1), self.engine(lm=_moved(family))
            skip_unless(offers(mine, "take_parameters"), "takes no parameters of other engines")
            # what is derived from weights is renewed in the same way for all families
            generates = isinstance(mine, GenerationEngine) and family in self.families[:2]
            if generates:
                generate(mine, greedy=True)
            before, theirs = self.weights(mine), self.weights(source)
            mine.take_parameters(source, eta)
            cause = "mine = eta · theirs + (1 - eta) · mine, tied parameters once"
            where = source_of(mine, "take_parameters")
            for name, weight in self.weights(mine).items():
                mixed = before[name].lerp(theirs[name], eta)
                require_close(f"{name} at eta {eta}", weight, mixed, self.tolerance, cause, where)
            if generates:
                cause = "discard what was derived from the old weights"
                _require_greedy(mine, exported(mine), "after take_parameters", cause)

    def _require_reproducible(self) -> None:
        skip_unless(self.cls.REPRODUCIBLE, "does not promise it (REPRODUCIBLE)")


def generate(
    engine: GenerationEngine,
    sample: SequenceSample | None = None,
    seeds: Sequence[int] | None = None,
    **settings: Any,
) -> GeneratedResponses:
    sample = sample if sample is not None else prompts()
    gconfig = GenerationHyperparameters(**({"max_new_tokens": NEW_TOKENS} | settings))
    seeds = seeds if seeds is not None else range(sample.bs * gconfig.responses_per_prompt)
    return engine.generate(sample, TinyTokenizer(), gconfig, seeds)


def response_scores(
    plain: nn.Module, prompt: torch.Tensor, response: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[R] log-probs of the response's tokens, by a forward pass over the prompt and them."""
    text = packed([torch.cat([prompt, response])])
    return plain_scores(plain, text, temperature=temperature)[len(prompt) - 1 :]


def asked() -> list[torch.Tensor]:
    """The prompts, one by one."""
    return sequences(prompts(), "packed_prompts")


@torch.no_grad()
def _moved(family: str) -> nn.Module:
    """A model whose norms and biases, too, have other values than at the start of training."""
    lm = tiny_model(family, seed=2)
    for parameter in lm.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return lm


def exported(engine: HoldsWeights) -> nn.Module:
    """The model that transformers loads from an export of a single-rank engine."""
    with tempfile.TemporaryDirectory() as folder:
        engine.save_to_hf(None, str(Path(folder) / "model"))
        return loaded(Path(folder) / "model")


def loaded(folder: Path) -> nn.Module:
    """A language model's folder, loaded by transformers, without gradients."""
    return load_saved(folder, "lm").eval().requires_grad_(False)


def _require_greedy(
    engine: GenerationEngine, lm: nn.Module, when: str, cause: str, **settings: Any
) -> None:
    """Raises Violation unless the engine's greedy answers are those of a transformers model."""
    drawn, where = generate(engine, greedy=True, **settings), source_of(engine, "generate")
    answers = greedy_answers(lm, prompts(), NEW_TOKENS)
    responses = zip(drawn.tokens, drawn.ended.tolist(), answers, strict=True)
    for number, (tokens, ended, answer) in enumerate(responses):
        if tokens.tolist() != answer:
            finding = f"greedy answer {number} is {tokens.tolist()}, not {answer} ({when})"
            raise Violation(finding, cause, where)
        if ended != (answer[-1] == END):
            raise Violation(
                f"ended is {ended} of a response whose last token is {answer[-1]} ({when})",
                f"ended says that the response closed with an end token ({END})",
                where,
            )
