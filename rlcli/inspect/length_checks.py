"""Whether the rows of a dataset and their responses fit where they must."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlcli.api.data import Preview, Survey
from rlcli.inspect.findings import Finding, quantile, share
from rlcli.inspect.row_checks import RowLimits, location, some_of
from rlcli.inspect.rows import OpenDataset
from rlcli.units import grouped, grouped_count

CUT_ANSWERS = 0.05
"""Share of answers that may be longer than a response."""


def check_lengths(opened: OpenDataset, rows: Sequence[Preview], limits: RowLimits) -> list[Finding]:
    """The distribution of lengths, and what becomes of rows that do not fit."""
    survey = opened.survey
    lengths = sorted(survey.lengths if survey else [max(map(len, row.sequences)) for row in rows])
    says = (
        f"min {lengths[0]}, median {quantile(lengths, 0.5)}, p99 {quantile(lengths, 0.99)}, "
        f"max {lengths[-1]} tokens"
    )
    about = f"{opened.name} lengths"
    if survey is None:
        return [Finding(level="ok", about=about, says=says), *_check_room(about, lengths, limits)]
    says += f"; max_length {survey.max_length}"
    finding = _overlong(opened.name, survey, about, says)
    lengths_read = [min(length, survey.max_length) for length in lengths]
    return [
        finding or Finding(level="ok", about=about, says=says),
        *_check_room(about, lengths_read, limits),
    ]


def _overlong(name: str, survey: Survey, about: str, distribution: str) -> Finding | None:
    """What happens to rows beyond `max_length`; None if there are none."""
    if not survey.too_long:
        return None
    fate = {"drop": "dropped", "error": "refused"}.get(survey.overlong, "cut short")
    percent = share(survey.too_long, len(survey.lengths))
    over = f"{grouped_count(survey.too_long, 'row')} ({percent})"
    return Finding(
        level="warn",
        about=about,
        says=f"{over} longer than {survey.max_length} tokens: {fate} (overlong: {survey.overlong})",
        details=[distribution],
        fix=f"raise datasets.{name}.args.max_length to keep them",
        code="F30",
    )


def _check_room(about: str, lengths: Sequence[int], limits: RowLimits) -> Iterable[Finding]:
    """Whether the rows with their responses fit into the model's positions, its cache and a
    micro-batch."""
    follows = f" with {limits.new_tokens} new tokens" if limits.new_tokens else ""
    full_lengths = [length + limits.new_tokens for length in lengths]
    for problem, fix in (
        _beyond_positions(full_lengths, follows, limits),
        _beyond_cache(full_lengths[-1], follows, limits),
        _beyond_microbatch(full_lengths[-1], follows, limits),
    ):
        if problem:
            yield Finding(level="FAIL", about=about, says=problem, fix=fix, code="F30", exit_code=4)


def _beyond_positions(
    full_lengths: Sequence[int], follows: str, limits: RowLimits
) -> tuple[str, str]:
    """(problem, what to do about it); the problem is empty if there is none."""
    fix = "lower max_length" + (" or generation.max_new_tokens" if limits.new_tokens else "")
    if limits.positions is None or full_lengths[-1] <= limits.positions:
        return "", fix
    over = sum(length > limits.positions for length in full_lengths)
    problem = (
        f"{grouped_count(over, 'row')} ({share(over, len(full_lengths))}){follows} go beyond the "
        f"model's {grouped(limits.positions)} positions (max_position_embeddings)"
    )
    return problem, fix


def _beyond_cache(longest: int, follows: str, limits: RowLimits) -> tuple[str, str]:
    """Likewise."""
    fix = "raise the backend's kv_cache_tokens, or lower generation.max_new_tokens"
    if not limits.new_tokens or limits.cache is None or longest <= limits.cache:
        return "", fix
    problem = (
        f"the longest row{follows} takes up to {grouped(longest)} tokens; the KV "
        f"cache has room for {grouped(limits.cache)}"
    )
    return problem, fix


def _beyond_microbatch(longest: int, follows: str, limits: RowLimits) -> tuple[str, str]:
    """Likewise."""
    fix = "raise train.max_tokens_per_microbatch, or shorten prompts and responses"
    sample = longest * limits.responses
    if sample <= limits.microbatch:
        return "", fix
    group = f", {limits.responses} responses together," if limits.responses > 1 else ""
    problem = (
        f"the longest row{follows}{group} takes up to {grouped(sample)} tokens; a "
        f"micro-batch holds {grouped(limits.microbatch)}"
    )
    return problem, fix


def check_answers(
    name: str, tokenizer: Any, rows: Sequence[Preview], limits: RowLimits
) -> Finding | None:
    """Whether a response has room for the answer that a row names, and the token that ends it. None
    if no response follows, or nearly all answers fit."""
    answers = {location(row): str(row.metadata.get("answer") or "") for row in rows}
    if not limits.new_tokens or not any(answers.values()):
        return None
    encoded = tokenizer(list(answers.values()), add_special_tokens=False).input_ids
    lengths = dict(zip(answers, (len(tokens) + 1 for tokens in encoded), strict=True))
    return _check_responses(f"{name} answers", "", lengths, limits.new_tokens)


def check_taught(recipe: str, rows: Sequence[Preview], new_tokens: int) -> Finding | None:
    """Whether a response has room for the answers that its model was trained on in the recipe that
    it starts from. None if nearly all fit, or the rows have no answers."""
    lengths = {location(row): max(map(sum, row.trained)) for row in rows if row.trained}
    return _check_responses("responses", f" that {recipe} trains on", lengths, new_tokens)


def _check_responses(
    about: str, of_what: str, lengths: Mapping[str, int], new_tokens: int
) -> Finding | None:
    """`lengths`: those of answers by their location, each with the token that ends it."""
    cut = [where for where, length in lengths.items() if length > new_tokens]
    if len(cut) <= CUT_ANSWERS * len(lengths):
        return None
    answers = f"{grouped_count(len(cut), 'answer')}{of_what} ({share(len(cut), len(lengths))})"
    says = f"{answers} take more than the {new_tokens} tokens of a response, its end included"
    return Finding(
        level="warn",
        about=about,
        says=says,
        details=some_of(cut),
        fix="raise generation.max_new_tokens",
        code="F30",
    )
