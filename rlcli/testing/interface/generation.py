"""Checks of generation: limits, groups, endings, and log-probs that recomputation confirms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
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
from rlcli.testing.interface.logprobs import check_logprobs
from rlcli.testing.interface.mocks import check_mock
from rlcli.testing.interface.outputs import (
    check_empty,
    check_numbers,
    frozen_copy,
    gap,
    sequences,
    tensor_of,
)
from rlcli.testing.interface.training_trial import Batches, Make, overrides, untried

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
    logprobs: torch.Tensor
    """[P + R - 1]"""
    was_cut_off: bool
    id: Any

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :].tolist()


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

    def sampled(self, interface: Any) -> list[SampledResponse]:
        """The responses that an interface with other settings samples."""
        return self.responses(self.run(self.batch, interface=interface))

    def responses(self, output: SequenceSample) -> list[SampledResponse]:
        """The sequences of an output, which must be a group for each prompt of the batch."""
        group = self.group
        for key in LAYOUT:
            if key not in output.keys:
                raise Violation(f"generate does not return {key}", "a rollout needs it", self.where)
            for id_, lengths in zip(output.ids, output.seqlens[key], strict=True):
                if len(lengths) != group:
                    finding = f"{key} of sample {id_} has {len(lengths)} sequences, not {group}"
                    raise Violation(
                        finding, "a sample holds all responses to its prompt", self.where
                    )
        tokens, masks, logprobs = (sequences(output, key) for key in LAYOUT[:3])
        prompts = sequences(self.batch, "packed_prompts")
        cut_off = tensor_of(output, "seq_no_eos_mask").tolist()
        return [
            SampledResponse(
                prompts[n // group],
                tokens[n],
                masks[n],
                logprobs[n],
                bool(cut_off[n]),
                output.ids[n // group],
            )
            for n in range(len(cut_off))
        ]

    @functools.cached_property
    def usual(self) -> list[SampledResponse]:
        return self.responses(self.result)


class GenerationChecks(CallSubject):
    @pytest.fixture
    def sampling(self, make: Make, tokenizer: Any, request: pytest.FixtureRequest) -> SamplingTrial:
        """Repeated generation."""
        skip_unless(overrides(make(), "generate"), "does not generate")
        return SamplingTrial(
            make, usual_batch(request.getfixturevalue("prompt_batches"), PROMPTS), tokenizer
        )

    def test_its_generation_can_be_tried(
        self, make: Make, batches: Batches, prompt_batches: Batches
    ) -> None:
        """a batch can be made with the keys that generation reads"""
        skip_unless(overrides(make(), "generate"), "does not generate")
        if overrides(make(), "train_step"):
            usual_batch(batches)  # the keys that it lacks may be the same
        try:
            prompt_batches(PROMPTS)
        except ValueError as error:
            raise untried(self.name, "generate", "prompt_batches", make(), error) from error

    def test_generation_returns_what_it_declares(self, sampling: SamplingTrial) -> None:
        """generation returns its samples with the declared keys"""
        sampling.check_form(sampling.result, sampling.batch.ids)
        check_numbers(sampling.result, sampling.where)

    def test_groups_are_in_the_order_of_the_prompts(self, sampling: SamplingTrial) -> None:
        """each prompt has its group, each response its prompt"""
        for number, response in enumerate(sampling.usual):
            head = response.tokens[: len(response.prompt)]
            if not torch.equal(head, response.prompt):
                prompt = response.prompt.tolist()
                finding = (
                    f"response {number} (of {response.id}) begins with {head.tolist()}, "
                    f"its prompt is {prompt}"
                )
                raise Violation(
                    finding,
                    "responses come prompt by prompt: response n answers prompt n // group",
                    sampling.where,
                )
            is_prompt = torch.arange(len(response.tokens)) < len(response.prompt)
            if len(response.mask) != len(is_prompt) or not torch.equal(response.mask, is_prompt):
                finding = (
                    f"prompt_mask marks {int(response.mask.sum())} tokens of a prompt of "
                    f"{len(response.prompt)}"
                )
                raise Violation(
                    finding, "True on the prompt's tokens, and on no other", sampling.where
                )

    @pytest.mark.parametrize("most", [1, 6])
    def test_responses_keep_their_limits(self, sampling: SamplingTrial, most: int) -> None:
        """responses respect max_new_tokens, and stop where they should"""
        inner = [token for response in sampling.usual for token in response.answer[:-1]] or [0]
        stop = max(sorted(set(inner)), key=inner.count)  # one that would occur within responses
        interface = sampling.with_settings(max_new_tokens=most, stop_token_ids=(stop,))
        ends = (sampling.tokenizer.eos_token_id, stop)
        for response in sampling.sampled(interface):
            for finding, cause in _broken_limits(response, most, ends):
                raise Violation(finding, cause, sampling.where)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_sampled_logprobs_are_those_of_the_model(
        self, sampling: SamplingTrial, temperature: float
    ) -> None:
        """log-probs of responses are confirmed by recomputation"""
        model, interface = sampling.model(), sampling.with_settings(temperature=temperature)
        output = sampling.run(sampling.batch, interface=interface, model=model)
        check_logprobs(output, "packed_logprobs", output, model.module, temperature, sampling.where)

    def test_greedy_takes_the_likeliest_token(self, sampling: SamplingTrial) -> None:
        """greedy takes the likeliest token each time"""
        model, interface = sampling.model(), sampling.with_settings(greedy=True)
        for response in sampling.responses(
            sampling.run(sampling.batch, interface=interface, model=model)
        ):
            with torch.no_grad():
                hidden = model.module.model(response.tokens, [len(response.tokens)])
                likeliest = (
                    (hidden @ model.module.model.head.T)
                    .argmax(-1)[len(response.prompt) - 1 : -1]
                    .tolist()
                )
            if response.answer != likeliest:
                raise Violation(
                    f"greedy answers {response.answer}, the likeliest tokens are {likeliest}",
                    "pass the settings to model.module.generate unchanged",
                    sampling.where,
                )

    def test_generation_is_deterministic(self, sampling: SamplingTrial) -> None:
        """the same seed gives the same responses at any step, another seed gives others"""
        again = sampling.run(sampling.batch, interface=sampling.with_settings())
        cause = "draw every response from a seed: stable_seed(model.seed, id, attempt, number)"
        sampling.demand_same(again, "between two calls alike", cause, exact=True)
        later = sampling.model()
        later.version.global_step = 1
        cause = (
            "leave the step and the version out of seeds: a response must not "
            "depend on when it is sampled"
        )
        at_next_step = sampling.run(sampling.batch, model=later)
        sampling.demand_same(at_next_step, "at the next step", cause, exact=True)
        retried = frozen_copy(sampling.batch)
        retried.metadata[ATTEMPT] = [1] * retried.bs
        others = {
            "another seed of the role": sampling.run(sampling.batch, model=sampling.model(seed=1)),
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
        alike = sum(
            usual[n : n + group].count(usual[n]) == group for n in range(0, len(usual), group)
        )
        if alike * group == len(usual):
            raise Violation(
                f"all {group} responses to a prompt are alike, for each of {alike} prompts",
                "the number within the group belongs in the seed",
                sampling.where,
            )

    def test_responses_do_not_depend_on_the_batch(self, sampling: SamplingTrial) -> None:
        """a prompt gets the same responses in any batch"""
        cause = "seed each response by the id of its prompt, not by its position in the batch"
        for index in range(sampling.batch.bs):
            alone = sampling.run(sampling.batch.select_indices([index]))
            sampling.demand_same(alone, "when its prompt is alone", cause)
        turned = sampling.run(sampling.batch.reorder(list(reversed(range(sampling.batch.bs)))))
        sampling.demand_same(turned, "when the batch is reversed", cause)

    def test_generation_leaves_everything_alone(self, sampling: SamplingTrial) -> None:
        """generation changes neither its input nor the model, and uses it without dropout"""
        sampling.check_left_alone()

    def test_generation_for_no_prompts(self, sampling: SamplingTrial) -> None:
        """an empty batch gives empty outputs of the same dtypes"""
        empty = sampling.run(sampling.batch.select_indices([]))
        check_empty(empty, sampling.result, sampling.where)

    def test_mock_of_generation(self, sampling: SamplingTrial) -> None:
        """mock of generation looks like the real thing"""
        check_mock(sampling)
        ends = {sampling.tokenizer.eos_token_id}
        for response in sampling.responses(sampling.mock(sampling.batch)):
            answer, prompt = response.answer, response.prompt
            fits = 1 <= len(answer) <= USUAL.max_new_tokens and response.was_cut_off == (
                answer[-1] not in ends
            )
            if (
                not fits
                or not torch.equal(response.tokens[response.mask], prompt)
                or ends & set(answer[:-1])
            ):
                raise Violation(
                    f"the mock answers {prompt.tolist()} by {answer}, cut off: "
                    f"{response.was_cut_off}",
                    "a mock respects max_new_tokens, and ends with an end token unless cut off",
                    sampling.where,
                )


def _broken_limits(
    response: SampledResponse, most: int, ends: tuple[int, int]
) -> Iterator[tuple[str, str]]:
    """(finding, cause) for each limit that a response breaks: its length, and the tokens that end
    it."""
    tokens, was_cut_off = response.answer, response.was_cut_off
    if not 1 <= len(tokens) <= most:
        finding = f"a response has {len(tokens)} tokens with max_new_tokens {most}"
        yield finding, "count the response alone, its last token included"
    described = f"{ends[0]} and {ends[1]} are the end tokens"
    if any(token in ends for token in tokens[:-1]):
        finding = f"a response continues after its end: {tokens}, where {described}"
        yield finding, "stop at the first token that ends"
    if was_cut_off != (tokens[-1] not in ends):
        finding = f"seq_no_eos_mask is {was_cut_off} for the response {tokens}, where {described}"
        yield (
            finding,
            (
                "set it to True for a response that was cut off; one that ended keeps "
                "the token that ended it"
            ),
        )
    if was_cut_off and len(tokens) < most:
        finding = (
            f"a response was cut off after {len(tokens)} of {most} tokens, or lost "
            "the token that ended it"
        )
        yield finding, "keep the end-of-sequence token, once"
