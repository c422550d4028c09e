"""Checks of generation: limits, groups, endings, and log-probs that recomputation confirms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ATTEMPT
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.inference_trial import (
    CallSubject,
    CallTrial,
    usual_batch,
)
from rlcli.testing.interface.logprobs import check_logprobs, distributions
from rlcli.testing.interface.mocks import check_mock
from rlcli.testing.interface.outputs import (
    check_numbers,
    frozen_copy,
    gap,
    sequences,
)
from rlcli.testing.interface.training_trial import Make, overrides, place_of_call

USUAL = GenerationHyperparameters(responses_per_prompt=2, max_new_tokens=6, temperature=0.7)
PROMPTS = [[(length, 1)] for length in (3, 1, 4, 2, 3, 5, 1, 2)]
"""(prompt, response) lengths; prompts have no responses yet."""

LAYOUT = ("packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask")


@dataclasses.dataclass(frozen=True)
class SampledResponse:
    """One generated sequence, split into its parts."""

    prompt: torch.Tensor
    """[P] the prompt that it answers."""
    tokens: torch.Tensor
    """[P + R] as returned."""
    mask: torch.Tensor
    """[P + R] whether a token is marked as one of the prompt."""
    was_cut_off: bool

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :].tolist()

    def check_prompt(self, where: str) -> None:
        """Raise Violation unless it begins with its prompt, which is marked as such."""
        size, prompt = len(self.prompt), self.prompt.tolist()
        if self.tokens[:size].tolist() != prompt:
            raise Violation(
                f"a response begins with {self.tokens[:size].tolist()}, its prompt is {prompt}",
                "responses come prompt by prompt: response n answers prompt n // group",
                where,
            )
        if not torch.equal(self.mask, torch.arange(len(self.tokens)) < size):
            raise Violation(
                f"prompt_mask marks {int(self.mask.sum())} tokens of a prompt of {size}",
                "True on the prompt's tokens, and on no other",
                where,
            )

    def check_end(self, most: int, ends: Collection[int], where: str) -> None:
        """Raise Violation unless it has at most so many tokens, and no other token of `ends` but
        its last one, which it lacks where it was cut off."""
        answer = self.answer
        is_end = [token in ends for token in answer]
        length = min(is_end.index(True) + 1 if any(is_end) else most, most)
        limits = f"with max_new_tokens {most} and the end tokens {[*ends]}"
        if len(answer) != length:
            raise Violation(
                f"a response has {len(answer)} tokens {limits}, not {length}: {answer}",
                "count the response alone, and stop at the first token that ends it, which stays",
                where,
            )
        if self.was_cut_off == is_end[-1]:
            raise Violation(
                f"seq_no_eos_mask is {self.was_cut_off} for the response {answer} {limits}",
                "set it to True for a response that was cut off, and to no other",
                where,
            )


class SamplingTrial(CallTrial):
    """Repeated generation."""

    def __init__(self, make: Make, batch: SequenceSample, tokenizer: Any):
        super().__init__(make, "generate", batch, tokenizer)

    @functools.cached_property
    def interface(self) -> Any:
        return self.with_settings()

    def with_settings(self, **changes: Any) -> Any:
        """The interface that samples with the usual settings, or with others."""
        skip_unless(
            hasattr(self.make(), "generation"),
            "not tried: takes no `generation`: its limits are its own",
        )
        return self.make(generation=dataclasses.asdict(dataclasses.replace(USUAL, **changes)))

    @property
    def group(self) -> int:
        """The number of responses to each prompt."""
        return self.interface.generation.responses_per_prompt

    def responses(self, output: SequenceSample) -> list[SampledResponse]:
        """The sequences of an output, which must be a group for each prompt of the batch."""
        group = self.group
        for key in LAYOUT:
            if key not in output.keys:
                raise Violation(f"generate does not return {key}", "a rollout needs it", self.where)
            for id_, lengths in zip(output.ids, output.seqlens[key], strict=True):
                if len(lengths) != group:
                    raise Violation(
                        f"{key} of sample {id_} has {len(lengths)} sequences, not {group}",
                        "a sample holds all responses to its prompt",
                        self.where,
                    )
        prompts = sequences(self.batch, "packed_prompts")
        columns = [sequences(output, key) for key in LAYOUT]
        return [
            SampledResponse(prompts[number // group], tokens, mask, bool(was_cut_off))
            for number, (tokens, mask, _, was_cut_off) in enumerate(zip(*columns, strict=True))
        ]

    @functools.cached_property
    def usual(self) -> list[SampledResponse]:
        return self.responses(self.result)


class GenerationChecks(CallSubject):
    @pytest.fixture
    def sampling(self, make: Make, tokenizer: Any, request: pytest.FixtureRequest) -> SamplingTrial:
        """Repeated generation."""
        skip_unless(overrides(make(), "generate"), "does not generate")
        batch = usual_batch(request.getfixturevalue("prompt_batches"), PROMPTS)
        return SamplingTrial(make, batch, tokenizer)

    def test_its_generation_can_be_tried(self, make: Make, request: pytest.FixtureRequest) -> None:
        """a batch can be made with the keys that generation reads"""
        skip_unless(overrides(make(), "generate"), "does not generate")
        self.demand_batch("generate", "prompt_batches", request, PROMPTS)

    def test_generation_returns_what_it_declares(self, sampling: SamplingTrial) -> None:
        """generation returns its samples with the declared keys"""
        sampling.check_form(sampling.result, sampling.batch.ids)
        check_numbers(sampling.result, sampling.where)

    def test_groups_are_in_the_order_of_the_prompts(self, sampling: SamplingTrial) -> None:
        """each prompt has its group, each response its prompt"""
        for response in sampling.usual:
            response.check_prompt(sampling.where)

    @pytest.mark.parametrize("most", [1, 6])
    def test_responses_keep_their_limits(self, sampling: SamplingTrial, most: int) -> None:
        """responses respect max_new_tokens, and stop where they should"""
        inner = [token for response in sampling.usual for token in response.answer[:-1]] or [0]
        stop = max(sorted(set(inner)), key=inner.count)  # one that would occur within responses
        interface = sampling.with_settings(max_new_tokens=most, stop_token_ids=(stop,))
        ends = (sampling.tokenizer.eos_token_id, stop)
        for response in sampling.responses(sampling.run(interface=interface)):
            response.check_end(most, ends, sampling.where)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_sampled_logprobs_are_those_of_the_model(
        self, sampling: SamplingTrial, temperature: float
    ) -> None:
        """log-probs of responses are confirmed by recomputation"""
        model, interface = sampling.model(), sampling.with_settings(temperature=temperature)
        output = sampling.run(interface=interface, model=model)
        check_logprobs(output, "packed_logprobs", output, model.module, temperature, sampling.where)

    def test_greedy_takes_the_likeliest_token(self, sampling: SamplingTrial) -> None:
        """greedy takes the likeliest token each time"""
        model, interface = sampling.model(), sampling.with_settings(greedy=True)
        output = sampling.run(interface=interface, model=model)
        for response in sampling.responses(output):
            choices = distributions(model.module, response.tokens)
            likeliest = choices.argmax(-1)[len(response.prompt) - 1 :].tolist()
            if response.answer != likeliest:
                raise Violation(
                    f"greedy answers {response.answer}, the likeliest tokens are {likeliest}",
                    "pass the settings to model.module.generate unchanged",
                    sampling.where,
                )

    def test_generation_is_deterministic(self, sampling: SamplingTrial) -> None:
        """the same seed gives the same responses at any step, another seed gives others"""
        again = sampling.run(interface=sampling.with_settings())
        cause = "draw every response from a seed: stable_seed(model.seed, id, attempt, number)"
        sampling.demand_same(again, "between two calls alike", cause, exact=True)
        later = sampling.model()
        later.version.global_step = 1
        sampling.demand_same(
            sampling.run(model=later),
            "at the next step",
            "leave the step and the version out of seeds: a response must not depend on when it is "
            "sampled",
            exact=True,
        )
        retried = frozen_copy(sampling.batch)
        retried.metadata[ATTEMPT] = [1] * retried.bs
        others = {
            "another seed of the role": sampling.run(model=sampling.model(seed=1)),
            "another attempt": sampling.run(retried),
        }
        for name, output in others.items():
            if gap(sampling.result, output) is None:
                cause = f'make seeds from model.seed, the id, metadata["{ATTEMPT}"] and the number'
                raise Violation(f"{name} gives the same responses", cause, sampling.where)

    def test_responses_of_a_group_differ(self, sampling: SamplingTrial) -> None:
        """the responses to one prompt differ"""
        group = sampling.group
        skip_if(group < 2, "one response to each prompt")
        usual = [response.answer for response in sampling.usual]
        groups = [usual[n : n + group] for n in range(0, len(usual), group)]
        if all(answers.count(answers[0]) == group for answers in groups):
            raise Violation(
                f"all {group} responses to a prompt are alike, for each of {len(groups)} prompts",
                "the number within the group belongs in the seed",
                sampling.where,
            )

    def test_responses_do_not_depend_on_the_batch(self, sampling: SamplingTrial) -> None:
        """a prompt gets the same responses in any batch"""
        cause = "seed each response by the id of its prompt, not by its position in the batch"
        sampling.check_alone(cause)
        sampling.check_order(cause)

    def test_generation_leaves_everything_alone(self, sampling: SamplingTrial) -> None:
        """generation changes neither its input nor the model, and uses it without dropout"""
        sampling.check_left_alone()

    def test_generation_for_no_prompts(self, sampling: SamplingTrial) -> None:
        """an empty batch gives empty outputs of the same dtypes"""
        sampling.check_no_samples()

    def test_mock_of_generation(self, sampling: SamplingTrial) -> None:
        """mock of generation looks like the real thing"""
        check_mock(sampling)
        where, end = place_of_call(sampling.interface, "mock"), sampling.tokenizer.eos_token_id
        for response in sampling.responses(sampling.mock(sampling.batch)):
            response.check_prompt(where)
            response.check_end(USUAL.max_new_tokens, [end], where)
