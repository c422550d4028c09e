"""`rlcli generate`: let a model answer prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.api.headway import doing
from rlcli.cli import arguments as options
from rlcli.cli.output import print_json, print_piece, print_text
from rlcli.errors import DataError, UsageError

if TYPE_CHECKING:
    from rlcli.launch.answering import GeneratedAnswer

MOST = 64 << 20
"""Maximum size of the prompts, in bytes."""


def generate(
    model: options.ModelName,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt; may be repeated."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="A prompt on each line; - is standard input."),
    ] = None,
    system: options.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a template.")
    ] = False,
    samples: Annotated[
        int, typer.Option("-n", "--samples", min=1, metavar="N", help="Responses to each prompt.")
    ] = 1,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 1,
    role: options.RoleName = None,
    step: options.StepNumber = None,
    as_json: options.AsJson = False,
) -> None:
    """Generate responses to prompts; without --prompt and --file, standard input is one prompt. For
    a run's model, they are formatted like the rows that it was trained on.

    Example: rlcli generate runs/ppo_math/20261121-120000 --prompt "What is 14+4-5-5?"
    """
    prompts = _prompts(prompt, file)
    settings = options.sampling(max_new_tokens, temperature, top_p, samples)
    with options.answering(model, role, step, seed) as (trained, answerer):
        style = options.prompt_format_of(trained, system, raw)
        tokens = [answerer.tokens_of_prompt(text, style) for text in prompts]
        if len(tokens) == 1 and samples == 1 and not as_json:
            _print_stream(answerer.stream(tokens[0], settings))
            return
        with doing("answering"):
            answers = answerer.answer(tokens, settings)
    (_print_json if as_json else _print)(prompts, answers)


def _prompts(typed: Sequence[str] | None, file: Path | None) -> list[str]:
    """Prompts of the command line, then of the file; none may be empty.
    Raises UsageError, DataError."""
    prompts = list(typed or ())
    if file is not None:
        # str.splitlines would also divide a prompt at U+2028, a form feed and others
        prompts += [line.removesuffix("\r") for line in _read(file).split("\n") if line.strip()]
    elif not prompts:
        piped = "" if sys.stdin.isatty() else _read(Path("-"))
        if not piped.strip():
            hint = "--prompt TEXT, --file FILE, or pipe a text into it"
            raise UsageError("no prompt given", hint=hint)
        # the end of the line that `echo` writes is not part of the text
        prompts = [piped.removesuffix("\n").removesuffix("\r")]
    if not prompts or not all(text.strip() for text in prompts):
        raise UsageError("a prompt is empty", hint="a model needs some text to answer")
    return prompts


def _read(file: Path) -> str:
    from rlcli.files import read_regular

    try:
        read = sys.stdin.buffer.read(MOST) if str(file) == "-" else read_regular(file, MOST)
        return read.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text", code="F31") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", code="F31") from None


def _print_stream(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print_piece(piece)
    print_text()


def _print(prompts: Sequence[str], answers: Sequence[Sequence[GeneratedAnswer]]) -> None:
    several = len(prompts) > 1
    for number, (prompt, group) in enumerate(zip(prompts, answers, strict=True)):
        if several:
            print_text(("\n" if number else "") + f"--- {prompt}")
        for index, answer in enumerate(group):
            if len(group) > 1:
                print_text(("\n" if index else "") + f"[{index + 1} of {len(group)}]")
            print_text(answer.text)


def _print_json(prompts: Sequence[str], answers: Sequence[Sequence[GeneratedAnswer]]) -> None:
    responses = [
        {"prompt": prompt, "number": number, **asdict(answer)}
        for prompt, group in zip(prompts, answers, strict=True)
        for number, answer in enumerate(group)
    ]
    print_json({"ok": True, "responses": responses})
