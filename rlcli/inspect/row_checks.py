"""What can be wrong with the rows of a dataset, given the recipe's tokenizer and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from rlcli.api.data import Preview
from rlcli.inspect.findings import Finding, count, grouped, share
from rlcli.inspect.rows import OpenDataset
from rlcli.inspect.text import shortened

EXAMPLES = 3
"""Number of rows that a finding names."""


@dataclass(frozen=True)
class RowLimits:
    """What a row has to fit into."""

    stop_ids: frozenset[int]
    """Tokens that end a response when they are sampled."""
    new_tokens: int
    """Tokens that may follow a prompt; 0 if nothing is generated."""
    responses: int
    """Responses to a prompt that are kept together."""
    positions: int | None
    """Longest sequence of the model, if its config says."""
    microbatch: int
    """Maximum tokens of a micro-batch."""
    cache: int | None = None
    """Tokens that the KV cache holds, if its backend sets a limit."""


def location(row: Preview) -> str:
    """Where a row is, or what it is called."""
    return row.where or row.id


def check_rows(opened: OpenDataset, looked_at: Sequence[Preview]) -> Finding:
    """How many rows there are, and how many could not be read."""
    says = f"{count(len(opened), 'row')} of {opened.type}"
    if opened.is_stream:
        says = f"a stream of {opened.type}; its first {count(len(opened), 'row')}"
    if len(looked_at) < len(opened):
        number = len(looked_at)
        says += (
            f"; checked the first {number}"
            if opened.is_drawn
            else f"; checked {number}, spread evenly"
        )
    bad = opened.survey.bad_rows if opened.survey else ()
    if not bad:
        return Finding(level="ok", about=opened.name, says=says, details=opened.notes)
    return Finding(
        level="warn",
        about=opened.name,
        says=f"{says}; {count(len(bad), 'bad row')} skipped",
        details=[*some_of(bad), *opened.notes],
        fix="correct them, or keep bad_rows: skip",
        code="F31",
    )


def check_mask(name: str, rows: Sequence[Preview]) -> Finding | None:
    """The share of tokens that is trained on; None for prompts alone."""
    masks = [
        (row, [flag for mask in row.trained for flag in mask])
        for row in rows
        if row.trained is not None
    ]
    if not masks:
        return None
    about = f"{name} loss mask"
    nothing = [row for row, flags in masks if not any(flags)]
    if nothing:
        says = f"{len(nothing)} of {len(masks)} checked rows train on 0 tokens"
        fix = "give the rows an answer, or fix the dataset's mask; rlcli tokens shows a row"
        if len(nothing) == len(masks):
            return Finding(
                level="FAIL",
                about=about,
                says=says,
                details=_places(nothing),
                fix=fix,
                code="F31",
                exit_code=4,
            )
        return Finding(
            level="warn", about=about, says=says, details=_places(nothing), fix=fix, code="F31"
        )
    if all(all(flags) and row.prompt != "" for row, flags in masks):
        says = "every token is trained on, those of the prompts too"
        return Finding(
            level="warn",
            about=about,
            says=says,
            fix="mask the prompts, unless you mean it",
            code="F31",
        )
    trained, tokens = sum(sum(flags) for _, flags in masks), sum(len(flags) for _, flags in masks)
    says = f"{share(trained, tokens)} of the tokens are trained on"
    how = {row.masked_by for row, _ in masks}
    return Finding(
        level="ok",
        about=about,
        says=f"{says}: {how.pop()}" if len(how) == 1 and None not in how else says,
    )


def check_pairs(name: str, rows: Sequence[Preview]) -> Finding | None:
    """Pairs of a preferred and a rejected answer that are the same text: nothing is learned from
    them. `rows` hold the sequences of one pair after those of another. None if all pairs differ."""
    equal = [row for row in rows if any(map(eq, row.sequences[::2], row.sequences[1::2]))]
    if not equal:
        return None
    return Finding(
        level="warn",
        about=f"{name} pairs",
        says=f"in {len(equal)} of {len(rows)} checked rows both answers are the same",
        details=_places(equal),
        fix="remove these pairs: nothing can be learned from them",
        code="F31",
    )


def check_ends(name: str, tokenizer: Any, rows: Sequence[Preview], limits: RowLimits) -> Finding:
    """Whether rows begin with one BOS token, if the tokenizer adds it, and end with a token that
    stops generation and is trained on."""
    about, bos = f"{name} begin/end", tokenizer.bos_token_id
    doubled = [
        row
        for row in rows
        if bos is not None and any(ids[:2] == [bos, bos] for ids in row.sequences)
    ]
    if doubled:
        says = (
            f"{len(doubled)} of {len(rows)} checked rows begin with {_token(tokenizer, bos)} twice"
        )
        fix = (
            "the template and the tokenizer both write it: take it out of the "
            "chat template or the text"
        )
        return Finding(
            level="FAIL",
            about=about,
            says=says,
            details=_places(doubled),
            fix=fix,
            code="F32",
            exit_code=4,
        )
    adds_bos = bos is not None and list(tokenizer("a").input_ids)[:1] == [bos]
    without = [row for row in rows if any(ids[:1] != [bos] for ids in row.sequences)]
    beginning = (
        f"one {_token(tokenizer, bos)} in front"
        if len(without) < len(rows)
        else "nothing added in front"
    )
    if adds_bos and without:
        says = (
            f"{len(without)} of {len(rows)} checked rows lack {_token(tokenizer, bos)}, "
            "which the tokenizer adds"
        )
        fix = "write {{ bos_token }} into the chat template, unless the model was trained without"
        return Finding(
            level="warn", about=about, says=says, details=_places(without), fix=fix, code="F32"
        )
    return _check_stops(about, beginning, tokenizer, rows, limits)


def _check_stops(
    about: str, beginning: str, tokenizer: Any, rows: Sequence[Preview], limits: RowLimits
) -> Finding:
    stops = ", ".join(_token(tokenizer, stop) for stop in sorted(limits.stop_ids))
    answered = [row for row in rows if row.trained is not None]
    if not answered:
        closed = [
            row
            for row in rows
            if any(ids[-1:] == [tokenizer.eos_token_id] for ids in row.sequences)
        ]
        if closed:
            says = (
                f"{len(closed)} of {len(rows)} checked prompts end with the end-of-sequence token"
            )
            fix = "a response cannot follow the end: fix the template's generation prompt"
            return Finding(
                level="FAIL",
                about=about,
                says=says,
                details=_places(closed),
                fix=fix,
                code="F32",
                exit_code=4,
            )
        return Finding(level="ok", about=about, says=f"{beginning}; responses end with {stops}")
    endless = [row for row in answered if not _ends_with_trained(row, limits.stop_ids)]
    if endless:
        says = (
            f"{len(endless)} of {len(answered)} checked rows do not train the stop "
            f"token {stops} at their end"
        )
        details = ["a model that never sees it there does not learn to stop", *_places(endless)]
        if len(endless) == len(answered):
            fix = "end the answers with it, or name their last token in generation.stop_token_ids"
            return Finding(
                level="FAIL",
                about=about,
                says=says,
                details=details,
                fix=fix,
                code="F32",
                exit_code=4,
            )
        return Finding(
            level="warn",
            about=about,
            says=says,
            details=details,
            fix="do not cut answers",
            code="F32",
        )
    return Finding(level="ok", about=about, says=f"{beginning}; the stop token {stops} is trained")


def _ends_with_trained(row: Preview, stops: frozenset[int]) -> bool:
    """Whether every sequence trains a stop token at its end; one token, such as a newline,
    may follow it."""
    masks = row.trained or ()
    return all(
        any(token in stops and flag for token, flag in list(zip(ids, mask, strict=True))[-2:])
        for ids, mask in zip(row.sequences, masks, strict=True)
    )


def check_repeats(opened: OpenDataset, rows: Sequence[Preview]) -> Finding | None:
    """Prompts that occur more than once."""
    prompts = known_prompts(opened, rows)
    first: dict[str, str] = {}
    repeated = []
    for where, prompt in prompts:
        if first.get(prompt, where) != where:  # a mixture may use a row several times
            repeated.append(f"{where} repeats {first[prompt]}")
        first.setdefault(prompt, where)
    if not repeated:
        return None
    says = (
        f"{grouped(len(repeated))} of {count(len(prompts), 'prompt')} occur before in the dataset"
    )
    fix = "drop them, unless they should weigh more"
    return Finding(
        level="warn",
        about=f"{opened.name} repeats",
        says=says,
        details=some_of(repeated),
        fix=fix,
        code="F79",
    )


def check_leak(
    train: OpenDataset, held_out: OpenDataset, rows: dict[str, Sequence[Preview]]
) -> Finding:
    """Held-out prompts that are trained on."""
    trained = {prompt: where for where, prompt in known_prompts(train, rows[train.name])}
    prompts = known_prompts(held_out, rows[held_out.name])
    leaked = [f"{where} is {trained[prompt]}" for where, prompt in prompts if prompt in trained]
    about = "held-out rows"
    if not leaked:
        all_rows = len(prompts) == len(held_out) and len(trained) >= len(train)
        scope = "" if all_rows else " among the rows that were checked"
        return Finding(
            level="ok",
            about=about,
            says=f"{held_out.name} shares no prompt with {train.name}{scope}",
        )
    says = (
        f"{grouped(len(leaked))} of {count(len(prompts), 'prompt')} of {held_out.name} "
        f"are in {train.name} too"
    )
    fix = f"take them out of {train.name}; evaluating on them overstates accuracy"
    return Finding(
        level="warn", about=about, says=says, details=some_of(leaked), fix=fix, code="F79"
    )


def known_prompts(opened: OpenDataset, rows: Sequence[Preview]) -> list[tuple[str, str]]:
    """(where it is, its words) of all rows that the dataset knows of,
    or else of those inspected."""
    if opened.survey:
        return [(where, _plain(prompt)) for where, prompt in opened.survey.prompts if prompt]
    return [
        (location(row), _plain(row.prompt if row.prompt is not None else str(row.sequences)))
        for row in rows
    ]


def _plain(prompt: str) -> str:
    """A prompt with its whitespace normalised."""
    return " ".join(prompt.split())


def _token(tokenizer: Any, id_: int | None) -> str:
    return "nothing" if id_ is None else shortened(tokenizer.decode([id_]) or str(id_), 30)


def _places(rows: Sequence[Preview]) -> list[str]:
    return some_of([location(row) for row in rows])


def some_of(examples: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    shown = [shortened(example, 200) for example in examples[:EXAMPLES]]
    rest = len(examples) - len(shown)
    return [*shown, f"… and {grouped(rest)} more"] if rest else shown
