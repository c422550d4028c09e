"""`rlcli chat`: talk to a model."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli import arguments as options
from rlcli.cli.output import (
    flush,
    print_labelled,
    print_piece,
    print_styled,
    print_talk,
    print_text,
)
from rlcli.errors import ModelError, RlcliError
from rlcli.observe.series import short

if TYPE_CHECKING:
    from rlcli.api.config import GenerationHyperparameters
    from rlcli.launch.answering import Answerer
    from rlcli.launch.playing import EpisodeRow, Played, Player, RowsToPlay
    from rlcli.recipe.prompt_format import PromptFormat

HELP = "Ctrl-C stops an answer, Ctrl-D leaves"
ASK = "you> "
RESET = "/reset"


def chat(
    model: options.ModelName,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    seed: options.Seed = 1,
    environment: Annotated[
        str | None,
        typer.Option(
            "--environment", metavar="NAME", help="Play with it; a run plays with its own."
        ),
    ] = None,
    role: options.RoleName = None,
    step: options.StepNumber = None,
) -> None:
    """Talk to a model with its own chat template; without one, each line is a prompt of its own.
    Ctrl-C stops an answer, /reset starts over, Ctrl-D leaves. With an environment each line begins
    an episode, of which every turn is shown.

    Example: rlcli chat runs/ppo_gsm8k/20261121-120000
    """
    from rlcli.launch.playing import Player, chosen_interface, rows_to_play

    settings = options.sampling(max_new_tokens, temperature, top_p)
    with options.answering(model, role, step, seed) as (trained, answerer):
        interface = chosen_interface(trained.run, environment, "chat")
        style = options.prompt_format_of(trained, system)
        if interface is not None:
            player = Player(answerer, interface, settings)
            rows = rows_to_play(trained.run) if trained.run and environment is None else None
            print_talk(f"{trained.described}, playing with {player.environment}.")
            print_talk(_to_play(rows))
            _play(player, rows, style)
        elif answerer.chats:
            answerer.check_template()
            print_talk(f"{trained.described}. {HELP}, /reset forgets the conversation")
            _talk(answerer, settings, style.system)
        else:
            print_talk(f"{trained.described}. {_no_template(style)}. {HELP}")
            _answer_each(answerer, settings, style)
    print_text()


def _no_template(style: PromptFormat) -> str:
    from rlcli.recipe.prompt_format import QUESTION

    text = style.text(QUESTION)
    written = f", written as {text!r}" if text != QUESTION else ""
    return f"The model has no chat template: each line is a prompt of its own{written}"


def _talk(answerer: Answerer, settings: GenerationHyperparameters, system: str | None) -> None:
    """Answer lines, each the next message of a conversation, until the input ends."""
    first = [{"role": "system", "content": system}] if system is not None else []
    conversation = list(first)
    for turn, line in enumerate(_lines(commands=[RESET])):
        if line.strip() == RESET:
            conversation = list(first)
            print_talk("(a new conversation)")
            continue
        conversation.append({"role": "user", "content": line})
        try:
            tokens = answerer.tokens_of(conversation)
            limited = _with_room(settings, len(tokens), answerer.positions)
            answer = _answer(answerer, tokens, limited, turn)
        except ModelError as error:
            conversation.pop()
            print_talk(f"{error.what}. /reset forgets what was said so far")
            continue
        conversation.append({"role": "assistant", "content": answer})


def _with_room(
    settings: GenerationHyperparameters, used: int, positions: int | None
) -> GenerationHyperparameters:
    """The settings for an answer that leaves half of the model's free positions to later turns.
    `used`: tokens of the conversation. Raises ModelError if no position is free."""
    if positions is None:
        return settings
    if used >= positions:
        raise ModelError(
            f"the conversation has {used} tokens, and the model has {positions} positions"
        )
    room = (positions - used + 1) // 2
    if room >= settings.max_new_tokens:
        return settings
    print_talk(
        f"(up to {room} tokens: {used} of {positions} positions are taken, and half of the rest is "
        "left to later turns)"
    )
    return replace(settings, max_new_tokens=room)


def _answer_each(
    answerer: Answerer, settings: GenerationHyperparameters, style: PromptFormat
) -> None:
    """Answer lines, each a prompt of its own, until the input ends."""
    for turn, line in enumerate(_lines()):
        try:
            _answer(answerer, answerer.tokens_of_prompt(line, style), settings, turn)
        except ModelError as error:
            print_talk(error.what)


def _to_play(rows: RowsToPlay | None) -> str:
    begins = "Each line is a question"
    if rows is not None:
        begins += f", Enter alone plays the next row of {rows.name}"
    return f"{begins}. Ctrl-C stops an episode, Ctrl-D leaves"


def _play(player: Player, rows: RowsToPlay | None, style: PromptFormat) -> None:
    """Play an episode for each line until the input ends."""
    for number, line in enumerate(_lines(with_empty=rows is not None)):
        try:
            row = player.asked(line, style) if rows is None or line.strip() else rows.next_row()
            played = player.play(row, number, partial(_show_part, line))
        except RlcliError as error:
            print_talk(error.what)
        except KeyboardInterrupt:
            print_text("[…]")
        else:
            _print_played(row, played)


def _show_part(line: str, label: str, text: str) -> None:
    """Print a part of an episode; not its beginning if the user has just written it."""
    if label != "prompt" or not line.strip() or line.strip() not in text:
        print_labelled(label, text)
        flush()


def _print_played(row: EpisodeRow, played: Played) -> None:
    """Print how an episode has ended."""
    reward = "" if played.reward is None else f"reward {short(played.reward)}  "
    of_turns = ", ".join(map(short, played.turn_rewards))
    facts = [f"of turns {of_turns}"] if len(played.turn_rewards) > 1 else []
    facts += [f"{name} {value:g}" for name, value in played.numbers.items() if value]
    if row.answer is not None:
        facts.append(f"answer {row.answer}")
    print_styled(("    ", ""), (reward, "bold"), ("  ".join(facts), "dim"))


def _lines(with_empty: bool = False, commands: Sequence[str] = ()) -> Iterator[str]:
    """The user's lines until the end of the input, by default without empty ones. Ctrl-C discards a
    line; one that begins like a command, but is not among `commands`, is not passed on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - makes input() edit lines and remember them
    while True:
        try:
            flush()
            line = input(ASK if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print_text()
            continue
        command = re.match(r"/[a-z]+(?!\S)", line)
        if command is not None and line.strip() not in commands:
            problem = f"is not a command (available: {', '.join(commands) or 'none'})"
            if command[0] in commands:
                problem = "takes no text"
            hint = "begin the line with a blank to send it to the model"
            print_talk(f"{command[0]} {problem}; {hint}")
        elif with_empty or line.strip():
            yield line


def _answer(
    answerer: Answerer,
    tokens: Sequence[int],
    settings: GenerationHyperparameters,
    turn: int,
) -> str:
    """Print an answer while it is sampled. After Ctrl-C it is the text sampled so far."""
    text = ""
    with closing(answerer.stream(tokens, settings, turn)) as pieces:
        try:
            for piece in pieces:
                text += piece
                print_piece(piece)
        except KeyboardInterrupt:
            print_piece(" […]")
    print_text()
    return text
