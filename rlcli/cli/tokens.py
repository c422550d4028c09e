"""`rlcli tokens`: a row of a recipe's dataset as the model sees it,
and which of its tokens are trained on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import AsJson, Overrides, RecipeName, With, load
from rlcli.cli.output import has_colour, print_json, print_talk, print_text, write_text
from rlcli.errors import UsageError
from rlcli.files import not_writable

if TYPE_CHECKING:
    from rlcli.api.data import Preview
    from rlcli.inspect.rows import OpenDataset
    from rlcli.inspect.token_marks import Token
    from rlcli.inspect.token_page import PageRow
    from rlcli.recipe.resolve import Resolved


COLOURS = {(True, False): "32", (True, True): "1;4;32", (False, False): "2", (False, True): "36"}
"""(trained on, special) → terminal code: green; bold and underlined; dim; cyan."""
FOLLOWS = "1;32"
ROWS_OF_PAGE = 20
"""Rows of an HTML page, from the one that was requested."""


def tokens(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    row: Annotated[int, typer.Option("--row", metavar="N", help="Which row, counted from 1.")] = 1,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", metavar="NAME", help="Which dataset; default: the one for training."
        ),
    ] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="One line for each token, with its id.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write an HTML page of this row and the next ones."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a row's tokens, and which of them are trained on.

    Example: rlcli tokens sft_math --row 17
    """
    from rlcli.inspect.rows import open_dataset

    resolved = load(recipe, overrides, with_)
    name = _known(resolved, dataset or resolved.recipe.train.dataset)
    opened = open_dataset(resolved, name)
    numbers = [_in_range(row, len(opened), name)]
    if html is not None:
        numbers += range(row + 1, min(row + ROWS_OF_PAGE, len(opened) + 1))
    rows = [_row_of(resolved, opened, name, number) for number in numbers]
    if html is not None:
        _write_page(html, [shown for _, shown in rows], as_json)
        return
    (preview, shown), *_ = rows
    if as_json:
        print_json(_as_json(name, row, preview, shown.sequences))
    elif ids:
        _print_ids(shown)
    else:
        _print_marked(shown)


def _row_of(
    resolved: Resolved, opened: OpenDataset, name: str, number: int
) -> tuple[Preview, PageRow]:
    """A row, and how it is shown."""
    from rlcli.inspect.token_marks import tokens_of
    from rlcli.inspect.token_page import PageRow

    preview = opened.preview(number - 1)
    sequences = tokens_of(preview, opened.tokenizer.tokenizer)
    title = f"row {number} of {name} · {_counted(preview, sequences)}"
    follows = _what_follows(resolved) if preview.trained is None else ""
    return preview, PageRow(number, title, _facts(preview), sequences, follows)


def _known(resolved: Resolved, dataset: str) -> str:
    names = list(resolved.recipe.datasets)
    if dataset not in names:
        message = f"the recipe has no dataset {dataset!r}"
        raise UsageError(message, hint=f"it has {', '.join(names)}")
    return dataset


def _in_range(row: int, rows: int, dataset: str) -> int:
    if not 1 <= row <= rows:
        raise UsageError(f"dataset {dataset} has no row {row}", hint=f"its rows are 1 to {rows}")
    return row


def _counted(preview: Preview, sequences: Sequence[Sequence[Token]]) -> str:
    total = sum(map(len, sequences))
    several = f" in {len(sequences)} sequences" if len(sequences) > 1 else ""
    if preview.trained is None:
        return f"{total} tokens · a prompt"
    return (
        f"{total} tokens{several} · "
        f"{sum(token.trained for tokens in sequences for token in tokens)} trained"
    )


def _what_follows(resolved: Resolved) -> str:
    return f"the response follows, up to {resolved.recipe.generation.build().max_new_tokens} tokens"


def _facts(preview: Preview) -> list[tuple[str, str]]:
    """Facts about the row in addition to its tokens."""
    facts = [
        ("id", preview.id),
        ("from", preview.where or ""),
        ("answer", str(preview.metadata.get("answer", ""))),
        ("trained", preview.masked_by or ""),
    ]
    return [(name, value) for name, value in facts if value]


def _print_marked(row: PageRow) -> None:
    """Print tokens coloured on a terminal, with marks elsewhere."""
    coloured, follows = has_colour(sys.stdout), row.follows
    print_text(row.title)
    for number, tokens in enumerate(row.sequences, start=1):
        if len(row.sequences) > 1:
            print_text(f"sequence {number} of {len(row.sequences)}")
        line = _coloured(tokens) if coloured else _marked(tokens)
        if follows:
            line += _painted(f"▐ {follows} ▌", FOLLOWS) if coloured else f"▐ {follows} ▌"
        write_text(line + "\n")
    for name, value in row.facts:
        print_text(f"{name:<8}{value}")
    legend = "green is" if coloured else "▐ … ▌ is"
    if not follows:
        print_talk(
            f"{legend} trained on, the rest is masked. --ids shows token ids, --html a page."
        )


def _marked(tokens: Sequence[Token]) -> str:
    from rlcli.inspect.token_marks import runs

    stretches = (
        (trained, "".join(token.shown for token in group)) for trained, group in runs(tokens)
    )
    return "".join(f"▐{text}▌" if trained else text for trained, text in stretches)


def _coloured(tokens: Sequence[Token]) -> str:
    return "".join(_painted(token.shown, COLOURS[token.trained, token.special]) for token in tokens)


def _painted(text: str, codes: str) -> str:
    """Text in a colour that ends with each line, or it would spread over the rest of the terminal's
    line."""
    return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def _print_ids(row: PageRow) -> None:
    print_text(row.title)
    for tokens in row.sequences:
        print_text(f"{'place':>6}{'id':>8}  trained  text")
        for position, token in enumerate(tokens):
            shown = token.shown.replace("\n", "")
            print_text(
                f"{position:>6}{token.id:>8}  "
                f"{'yes' if token.trained else '-':<7}  {shown!r}".rstrip()
            )
    for name, value in row.facts:
        print_text(f"{name:<8}{value}")


def _write_page(file: Path, rows: Sequence[PageRow], as_json: bool) -> None:
    from rlcli.inspect.token_page import token_page

    try:
        file.write_text(token_page(rows), encoding="utf-8")
    except OSError as error:
        raise not_writable(file, error, "give another --html FILE") from None
    if as_json:
        print_json({"file": str(file), "rows": [row.number for row in rows]})
        return
    several = f": rows {rows[0].number} to {rows[-1].number}" if len(rows) > 1 else ""
    print_text(f"wrote {file}{several}")


def _as_json(
    name: str, row: int, preview: Preview, sequences: Sequence[Sequence[Token]]
) -> dict[str, Any]:
    return {
        "dataset": name,
        "row": row,
        "id": preview.id,
        "where": preview.where,
        "prompt_only": preview.trained is None,
        "answer": preview.metadata.get("answer"),
        "masked_by": preview.masked_by,
        "sequences": [
            [
                {"id": t.id, "text": t.text, "trained": t.trained, "special": t.special}
                for t in tokens
            ]
            for tokens in sequences
        ],
    }
