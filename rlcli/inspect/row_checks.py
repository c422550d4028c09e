"""What can be wrong with the rows of a dataset, given the recipe's tokenizer and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from rlcli.api.data import Preview
from rlcli.inspect.findings import Finding, share
from rlcli.inspect.rows import OpenDataset
from rlcli.inspect.text import shortened
from rlcli.units import grouped, grouped_count

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
    says = f"{grouped_count(len(opened), 'row')} of {opened.type}"
    if opened.is_stream:
        says = f"a stream of {opened.type}; its first {grouped_count(len(opened), 'row')}"
    if len(looked_at) < len(opened):
        number = len(looked_at)
        first = f"the first {number}" if opened.is_drawn else f"{number}, spread evenly"
        says += f"; checked {first}"
    bad = opened.survey.bad_rows if opened.survey else ()
    if not bad:
        return Finding(level="ok", about=opened.name, says=says, details=opened.notes)
    says += f"; {grouped_count(len(bad), 'bad row')} skipped"
    details = [*some_of(bad), *opened.notes]
    return _fault(opened.name, says, details, "correct them, or keep bad_rows: skip", "F31")


def _fault(
    about: str, says: str, details: Sequence[str], fix: str, code: str, *, fails: bool = False
) -> Finding:
    """A warning about rows, or a failure."""
    return Finding(
        level="FAIL" if fails else "warn",
        about=about,
        says=says,
        details=details,
        fix=fix,
        code=code,
        exit_code=4 if fails else 0,
    )


def _faulty_rows(
    about: str,
    faulty: Sequence[Preview],
    rows: Sequence[Preview],
    fault: str,
    fix: str,
    code: str,
    *,
    fails: bool = False,
) -> Finding:
    """A warning that so many of the checked rows have a fault, or a failure."""
    says = f"{len(faulty)} of {len(rows)} checked {fault}"
    return _fault(about, says, _locations(faulty), fix, code, fails=fails)


def check_mask(name: str, rows: Sequence[Preview]) -> Finding | None:
    """The share of tokens that is trained on; None for prompts alone."""
    answered = [row for row in rows if row.trained is not None]
    if not answered:
        return None
    about = f"{name} loss mask"
    untrained = [row for row in answered if not any(_flags(row))]
    if untrained:
        fault = "rows train on 0 tokens"
        fix = "give the rows an answer, or fix the dataset's mask; rlcli tokens shows a row"
        fails = len(untrained) == len(answered)
        return _faulty_rows(about, untrained, answered, fault, fix, "F31", fails=fails)
    if all(all(_flags(row)) and row.prompt != "" for row in answered):
        says = "every token is trained on, those of the prompts too"
        return _fault(about, says, (), "mask the prompts, unless you mean it", "F31")
    flags = [flag for row in answered for flag in _flags(row)]
    says = f"{share(sum(flags), len(flags))} of the tokens are trained on{_masked_by(answered)}"
    return Finding(level="ok", about=about, says=says)


def _flags(row: Preview) -> list[bool]:
    """Whether each token of a row is trained on, one sequence after the other."""
    return [flag for mask in row.trained or () for flag in mask]


def _masked_by(rows: Sequence[Preview]) -> str:
    """What has masked all rows, after a colon; empty if it is not the same for all, or unknown."""
    masked_by = {row.masked_by for row in rows}
    return f": {masked_by.pop()}" if len(masked_by) == 1 and None not in masked_by else ""


def check_pairs(name: str, rows: Sequence[Preview]) -> Finding | None:
    """Pairs of a preferred and a rejected answer that are the same text: nothing is learned from
    them. `rows` hold the sequences of one pair after those of another. None if all pairs differ."""
    equal = [row for row in rows if any(map(eq, row.sequences[::2], row.sequences[1::2]))]
    if not equal:
        return None
    says = f"in {len(equal)} of {len(rows)} checked rows both answers are the same"
    fix = "remove these pairs: nothing can be learned from them"
    return _fault(f"{name} pairs", says, _locations(equal), fix, "F31")


def check_ends(name: str, tokenizer: Any, rows: Sequence[Preview], limits: RowLimits) -> Finding:
    """Whether rows begin with one BOS token, if the tokenizer adds it, and end with a token that
    stops generation and is trained on."""
    about, bos = f"{name} begin/end", tokenizer.bos_token_id
    without = [row for row in rows if any(ids[:1] != [bos] for ids in row.sequences)]
    added = f"one {_token(tokenizer, bos)}" if len(without) < len(rows) else "nothing added"
    return (
        _doubled_bos(about, tokenizer, rows)
        or _missing_bos(about, tokenizer, without, rows)
        or _check_stops(about, f"{added} in front", tokenizer, rows, limits)
    )


def _doubled_bos(about: str, tokenizer: Any, rows: Sequence[Preview]) -> Finding | None:
    bos = tokenizer.bos_token_id
    doubled = [row for row in rows if any(ids[:2] == [bos, bos] for ids in row.sequences)]
    if not doubled:
        return None
    fault = f"rows begin with {_token(tokenizer, bos)} twice"
    fix = (
        "the template and the tokenizer both write it: take it out of the chat template or the text"
    )
    return _faulty_rows(about, doubled, rows, fault, fix, "F32", fails=True)


def _missing_bos(
    about: str, tokenizer: Any, without: Sequence[Preview], rows: Sequence[Preview]
) -> Finding | None:
    """A warning about the rows without a BOS token, if the tokenizer adds it."""
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and list(tokenizer("a").input_ids)[:1] == [bos]
    if not (adds_bos and without):
        return None
    fault = f"rows lack {_token(tokenizer, bos)}, which the tokenizer adds"
    fix = "write {{ bos_token }} into the chat template, unless the model was trained without"
    return _faulty_rows(about, without, rows, fault, fix, "F32")


def _check_stops(
    about: str, beginning: str, tokenizer: Any, rows: Sequence[Preview], limits: RowLimits
) -> Finding:
    stops = ", ".join(_token(tokenizer, stop) for stop in sorted(limits.stop_ids))
    answered = [row for row in rows if row.trained is not None]
    if not answered:
        closed = _closed_prompts(about, tokenizer.eos_token_id, rows)
        says = f"{beginning}; responses end with {stops}"
        return closed or Finding(level="ok", about=about, says=says)
    endless = [row for row in answered if not _ends_with_trained(row, limits.stop_ids)]
    if not endless:
        says = f"{beginning}; the stop token {stops} is trained"
        return Finding(level="ok", about=about, says=says)
    says = (
        f"{len(endless)} of {len(answered)} checked rows do not train the stop "
        f"token {stops} at their end"
    )
    details = ["a model that never sees it there does not learn to stop", *_locations(endless)]
    if len(endless) < len(answered):
        return _fault(about, says, details, "do not cut answers", "F32")
    fix = "end the answers with it, or name their last token in generation.stop_token_ids"
    return _fault(about, says, details, fix, "F32", fails=True)


def _closed_prompts(about: str, eos: int, rows: Sequence[Preview]) -> Finding | None:
    """A failure if prompts end with the token after which nothing can follow."""
    closed = [row for row in rows if any(ids[-1:] == [eos] for ids in row.sequences)]
    if not closed:
        return None
    fault = "prompts end with the end-of-sequence token"
    fix = "a response cannot follow the end: fix the template's generation prompt"
    return _faulty_rows(about, closed, rows, fault, fix, "F32", fails=True)


def _ends_with_trained(row: Preview, stops: frozenset[int]) -> bool:
    """Whether every sequence trains a stop token at its end; one token, such as a newline,
    may follow it."""
    masks = row.trained or ()
    for ids, mask in zip(row.sequences, masks, strict=True):
        last = list(zip(ids, mask, strict=True))[-2:]
        if not any(token in stops and flag for token, flag in last):
            return False
    return True


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
    of_all = grouped_count(len(prompts), "prompt")
    says = f"{grouped(len(repeated))} of {of_all} occur before in the dataset"
    fix = "drop them, unless they should weigh more"
    return _fault(f"{opened.name} repeats", says, some_of(repeated), fix, "F79")


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
        f"{grouped(len(leaked))} of {grouped_count(len(prompts), 'prompt')} of {held_out.name} "
        f"are in {train.name} too"
    )
    fix = f"take them out of {train.name}; evaluating on them overstates accuracy"
    return _fault(about, says, some_of(leaked), fix, "F79")


def known_prompts(opened: OpenDataset, rows: Sequence[Preview]) -> list[tuple[str, str]]:
    """(where it is, its words) of all rows that the dataset knows of,
    or else of those inspected."""
    if opened.survey:
        return [(where, _plain(prompt)) for where, prompt in opened.survey.prompts if prompt]
    prompts = [str(row.sequences) if row.prompt is None else row.prompt for row in rows]
    return list(zip(map(location, rows), map(_plain, prompts), strict=True))


def _plain(prompt: str) -> str:
    """A prompt with its whitespace normalised."""
    return " ".join(prompt.split())


def _token(tokenizer: Any, id_: int | None) -> str:
    return "nothing" if id_ is None else shortened(tokenizer.decode([id_]) or str(id_), 30)


def _locations(rows: Sequence[Preview]) -> list[str]:
    return some_of([location(row) for row in rows])


def some_of(examples: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    shown = [shortened(example, 200) for example in examples[:EXAMPLES]]
    rest = len(examples) - len(shown)
    return [*shown, f"… and {grouped(rest)} more"] if rest else shown
