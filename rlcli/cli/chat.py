"""`rlcli chat`: talk to a model."""

from __future__ import annotations

import contextlib
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from rlcli.cli import arguments as options
from rlcli.cli.output import flush, print_piece, print_talk, print_text
from rlcli.errors import ModelError

if TYPE_CHECKING:
    from rlcli.api.config import GenerationHyperparameters
    from rlcli.launch.answering import Answerer

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D leaves"
ASK = "you> "


def chat(
    model: options.ModelName,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    seed: options.Seed = 1,
    role: options.RoleName = None,
    step: options.StepNumber = None,
) -> None:
    """Talk to a model with its own chat template. Ctrl-C stops an answer,
    /reset starts over, Ctrl-D leaves.

    Example: rlcli chat runs/ppo_gsm8k/20261121-120000
    """
    settings = options.sampling(max_new_tokens, temperature, top_p)
    with options.answering(model, role, step, seed) as (trained, answerer):
        # a model without a template is refused here
        answerer.tokens_of([{"role": "user", "content": "?"}])
        print_talk(f"{trained.described}. {HELP}")
        _talk(answerer, settings, system)


def _talk(answerer: Answerer, settings: GenerationHyperparameters, system: str | None) -> None:
    """Read prompts and print answers until the input ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - makes input() edit lines and remember them
    first = [{"role": "system", "content": system}] if system is not None else []
    conversation, turn = list(first), 0
    while (question := _next_line()) is not None:
        if question.strip() == "/reset":
            conversation = list(first)
            print_talk("(a new conversation)")
        elif question.strip():
            conversation.append({"role": "user", "content": question})
            try:
                answer = _answer(answerer, conversation, settings, turn)
            except ModelError as error:
                conversation.pop()
                print_talk(f"{error.what}. /reset forgets what was said so far")
                continue
            conversation.append({"role": "assistant", "content": answer})
            turn += 1
    print_text()


def _next_line() -> str | None:
    """The user's next line; None at the end of the input. Ctrl-C discards the line."""
    while True:
        try:
            flush()
            return input(ASK if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print_text()


def _answer(
    answerer: Answerer,
    conversation: list[dict[str, str]],
    settings: GenerationHyperparameters,
    turn: int,
) -> str:
    """Print an answer while it is sampled. After Ctrl-C it is the text sampled so far."""
    text = ""
    tokens = answerer.tokens_of(conversation)
    with closing(answerer.stream(tokens, settings, turn)) as pieces:
        try:
            for piece in pieces:
                text += piece
                print_piece(piece)
        except KeyboardInterrupt:
            print_piece(" […]")
    print_text()
    return text
