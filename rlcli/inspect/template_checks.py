"""Whether a chat template does what training and generation need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcli.api.chat_template import conversation_text, shared_length
from rlcli.api.data import Preview
from rlcli.api.special_tokens import unmarked
from rlcli.inspect.findings import Finding
from rlcli.inspect.row_checks import RowLimits, location
from rlcli.inspect.text import shortened

MOST = 20
"""Rows that are rendered twice."""


def check_template(
    name: str, tokenizer: Any, rows: Sequence[Preview], limits: RowLimits
) -> Finding | None:
    """The text of a prompt must begin the text of the prompt with its answer; what follows must
    stop generation."""
    about = f"{name} template"
    has_template = bool(getattr(tokenizer, "chat_template", None))
    chats = [row for row in rows if row.chat and row.prompt is not None][:MOST]
    if not chats:
        if not has_template or any(row.chat for row in rows):
            return None
        return Finding(level="ok", about=about, says="the tokenizer's chat template is not used")
    try:
        rendered = [(row, *_both_ways(tokenizer, row)) for row in chats]
    except Exception as error:  # whatever a template raises, or makes jinja2 raise
        return Finding(
            level="FAIL",
            about=about,
            says=f"the chat template cannot render an answer: {error}",
            fix="fix the chat template",
            code="F32",
            exit_code=5,
        )
    broken = [
        (row, prompt, answered)
        for row, prompt, answered, _ in rendered
        if not answered.startswith(prompt)
    ]
    if broken:
        return _not_a_prefix(about, *broken[0], len(broken), len(chats))
    return _check_end(about, tokenizer, rendered, limits)


def _messages_of(row: Preview) -> list[dict[str, str]]:
    system = [{"role": "system", "content": row.system}] if row.system is not None else []
    return [*system, {"role": "user", "content": row.prompt or ""}]


def _both_ways(tokenizer: Any, row: Preview) -> tuple[str, str, str]:
    """(text of the prompt, text of the prompt with an answer, the answer)."""
    answer = row.answers[0] if row.answers else str(row.metadata.get("answer", "42"))
    messages = [dict(message) for message in row.messages or _messages_of(row)]
    prompt = unmarked(conversation_text(tokenizer, messages, add_generation_prompt=True))
    turn = {"role": "assistant", "content": answer}
    return (
        prompt,
        unmarked(conversation_text(tokenizer, [*messages, turn], add_generation_prompt=False)),
        answer,
    )


def _not_a_prefix(
    about: str, row: Preview, prompt: str, answered: str, broken: int, looked_at: int
) -> Finding:
    shared = shared_length(prompt, answered)
    return Finding(
        level="warn",
        about=about,
        says=(
            f"the prompt is not a prefix of the prompt with its answer in {broken} of "
            f"{looked_at} checked rows"
        ),
        details=[
            f"{location(row)}: after {shortened(prompt[:shared][-30:], 40)!r}",
            f"  prompt alone  {shortened(prompt[shared:], 60)!r}",
            f"  with answer   {shortened(answered[shared:], 60)!r}",
        ],
        fix=(
            "the template renders a finished turn differently from the generation prompt: "
            "fix the chat template"
        ),
        code="F32",
    )


def _check_end(
    about: str, tokenizer: Any, rendered: Sequence[tuple[Preview, str, str, str]], limits: RowLimits
) -> Finding:
    """What the template writes after an answer."""
    row, prompt, answered, answer = rendered[0]
    says = "a prompt is a prefix of the prompt with its answer"
    rest = answered[len(prompt) :]
    start = rest.find(answer.strip())
    if start < 0:
        return Finding(
            level="warn",
            about=about,
            says="the template does not render the answer as it is written",
            details=[f"{location(row)}: {shortened(rest, 60)!r}"],
            code="F32",
        )
    ending = rest[start + len(answer.strip()) :]
    ids = list(tokenizer(ending, add_special_tokens=False).input_ids) if ending else []
    first = next((id_ for id_ in ids if tokenizer.decode([id_]).strip()), None)
    if first is None or first in limits.stop_ids:
        shown = f"; answers end with {shortened(ending.strip(), 30)}" if ending.strip() else ""
        return Finding(level="ok", about=about, says=f"{says}{shown}")
    stops = ", ".join(tokenizer.decode([stop]) for stop in sorted(limits.stop_ids))
    return Finding(
        level="warn",
        about=about,
        says=(
            f"the template ends an answer with {shortened(ending, 30)}, but responses "
            f"stop at {stops} alone"
        ),
        details=["a chat model would continue after its answer"],
        fix=f"set generation.stop_token_ids=[{first}]",
        code="F32",
    )
