"""Whether a reward accepts the answers that the rows call right, and no others;
whether it scores rows at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from rlcli import registry
from rlcli.api.config import MicroBatchSpec, ModelInterfaceAbstraction
from rlcli.api.data import Preview, SequenceSample
from rlcli.api.interface import ANSWER_FORMS, ModelInterface
from rlcli.api.key_meaning import PROMPT_MASK, REWARDS, SEQUENCES
from rlcli.errors import RlcliError
from rlcli.inspect.findings import NO_TORCH, Finding, failure, needs_torch
from rlcli.inspect.row_checks import location
from rlcli.inspect.text import shortened
from rlcli.recipe.components import declared, declared_of_call, signature_of
from rlcli.recipe.schema import Call, Recipe
from rlcli.registry.faults import attribute_user_errors

MOST = 64
"""Rows whose answers are tried."""
FEW = 8
"""Rows on which a reward is tried that scores only batches."""
TEXT_KEYS = {SEQUENCES, PROMPT_MASK}
"""What a batch of responses holds before any other call."""


def scores_texts(call: Call) -> bool:
    """Whether the interface of a call offers `score_texts`; determined from its source."""
    return "score_texts" in signature_of("interfaces", call.interface.type).methods


def scores_responses(recipe: Recipe, call: Call) -> bool:
    """Whether a call gives rewards to responses alone, without a model, and may be tried."""
    read, written = declared_of_call("READS", call), declared_of_call("WRITES", call)
    return (
        call.call == "inference"
        and not recipe.models[call.model].has_weights
        and read is not None
        and TEXT_KEYS.issuperset(read.needed)
        and written is not None
        and REWARDS in written.needed
        and declared("interfaces", call.interface.type, "TRIED") is not False
    )


def try_reward(name: str, call: Call, tokenizer: Any, rows: Sequence[Preview]) -> Finding:
    """Let a reward score a few rows: each with its answer as the response, with that of another
    row, and with an empty one. A model will write all of these, and each needs a number."""
    about, tried = f"{name} reward", _spread(rows, FEW)
    rewards: list[float] = []
    for described, responses in _responses(tried).items():
        try:
            with attribute_user_errors():
                interface = registry.make_interface(
                    ModelInterfaceAbstraction(call.interface.type, call.interface.args)
                )
                rewards += _rewards(interface, tokenizer, tried, responses)
        except RlcliError as error:
            finding = failure(about, error)
            return replace(finding, details=[*finding.details, f"the responses were {described}"])
        except Exception as error:  # of rlcli or a library
            return _failed(about, call, error)
    of_answers = rewards[: len(tried)]
    says = (
        f"{len(tried)} rows scored with their answers as responses, from "
        f"{min(of_answers):g} to {max(of_answers):g}"
    )
    return Finding(level="ok", about=about, says=says)


def _responses(rows: Sequence[Preview]) -> dict[str, list[str]]:
    """Description → responses to try, one for each row."""
    golds = [str(row.metadata.get("answer", "")) for row in rows]
    others = [_another(golds, number) or "" for number in range(len(golds))]
    return {
        "the answers of their rows": golds,
        "the answers of other rows": others,
        "empty": [""] * len(rows),
    }


def _rewards(
    interface: ModelInterface, tokenizer: Any, rows: Sequence[Preview], responses: Sequence[str]
) -> list[float]:
    encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in responses]
    tokens = [(row.sequences[0], response) for row, response in zip(rows, encoded, strict=True)]
    metadata = {key: [row.metadata.get(key) for row in rows] for key in rows[0].metadata}
    scored = score_tokens(interface, tokenizer, [row.id for row in rows], tokens, metadata)
    return [float(reward) for reward in scored.data[REWARDS]]


def score_tokens(
    interface: ModelInterface,
    tokenizer: Any,
    ids: Sequence[str],
    tokens: Sequence[tuple[Sequence[int], Sequence[int]]],
    metadata: Mapping[str, list[Any]],
) -> SequenceSample:
    """Have a reward without weights score a batch of one response to each prompt, of which `tokens`
    are the tokens of both. Raises whatever the reward raises."""
    import torch

    from rlcli.api.model import Model

    sequences = [[*prompt, *response] for prompt, response in tokens]
    masks = [[True] * len(prompt) + [False] * len(response) for prompt, response in tokens]
    data = SequenceSample.from_default(
        ids=list(ids),
        seqlens=[len(sequence) for sequence in sequences],
        data={
            SEQUENCES: torch.tensor([*chain.from_iterable(sequences)], dtype=torch.long),
            PROMPT_MASK: torch.tensor([*chain.from_iterable(masks)], dtype=torch.bool),
        },
        metadata=dict(metadata),
    )
    model = Model("reward", None, tokenizer, torch.device("cpu"))
    scored: Any = interface.inference(model, data, MicroBatchSpec())
    return scored


def check_reward(name: str, call: Call, rows: Sequence[Preview]) -> Finding:
    """Try the gold answer of each row in the common forms, that of another row,
    and an empty response."""
    about = f"{name} reward"
    without = [row for row in rows if row.metadata.get("answer") is None]
    if without:
        return Finding(
            level="FAIL",
            about=about,
            code="F31",
            exit_code=4,
            details=[location(row) for row in without[:3]],
            says=(
                f"{len(without)} of {len(rows)} checked rows have no answer to "
                "compare a response with"
            ),
            fix=(
                "take a dataset whose rows have answers, such as math_prompts, or another "
                "reward: --reward NAME"
            ),
        )
    tried = _spread(rows, MOST)
    try:
        with attribute_user_errors():
            interface: Any = registry.make_interface(
                ModelInterfaceAbstraction(call.interface.type, call.interface.args)
            )
            return _judge(about, interface, tried)
    except RlcliError as error:
        return failure(about, error)
    except Exception as error:  # of rlcli or a library
        return _failed(about, call, error)


def _spread(rows: Sequence[Preview], most: int) -> list[Preview]:
    """At most `most` of the rows, evenly spread."""
    count = min(most, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def _failed(about: str, call: Call, error: Exception) -> Finding:
    if needs_torch(error):
        return Finding(level="skip", about=about, says=NO_TORCH)
    says = f"{call.interface.type} fails: {type(error).__name__}: {error}"
    return Finding(level="FAIL", about=about, says=says, code="F51", exit_code=7)


@dataclass(frozen=True)
class _Trial:
    """What a reward gave to the gold answers of rows, in every form, and to those of other rows."""

    rows: Sequence[Preview]
    accepted: list[list[bool]]
    """By form and row: whether the gold answer scored more than no answer."""
    decoys: list[str | None]
    """By row: the answer of another row, if it differs."""
    believed: list[int]
    """Rows for which that scored no less than the gold answer."""

    @classmethod
    def of(cls, interface: Any, rows: Sequence[Preview]) -> _Trial:
        golds = [str(row.metadata["answer"]) for row in rows]
        decoys = [_another(golds, number) for number in range(len(golds))]
        by_form = [_scores(interface, _written(form, golds), rows) for form in ANSWER_FORMS]
        nothing = _scores(interface, [""] * len(rows), rows)
        accepted = [_above_each(scores, nothing) for scores in by_form]
        best = max(range(len(ANSWER_FORMS)), key=lambda form: sum(accepted[form]))
        of_decoys = _scores(interface, _written(ANSWER_FORMS[best], decoys), rows)
        of_golds = [_highest(scores) for scores in zip(*by_form, strict=True)]
        believed = [
            number
            for number, decoy in enumerate(decoys)
            if decoy is not None and not _above(of_golds[number], of_decoys[number])
        ]
        return cls(rows, accepted, decoys, believed)

    @property
    def refused(self) -> list[Preview]:
        """Rows whose gold answer scored no more than no answer, in any form."""
        by_row = zip(*self.accepted, strict=True)
        return [row for row, forms in zip(self.rows, by_row, strict=True) if not any(forms)]

    def summary(self) -> str:
        count = len(self.rows)
        says = f"gold answers accepted {count - len(self.refused)}/{count}"
        tried = sum(decoy is not None for decoy in self.decoys)
        if tried:
            says += f", wrong ones refused {tried - len(self.believed)}/{tried}"
        return says


def _judge(about: str, interface: Any, rows: Sequence[Preview]) -> Finding:
    trial = _Trial.of(interface, rows)
    if trial.refused:
        return _refusing(about, trial.summary(), trial.refused)
    if trial.believed:
        return _believing(about, trial)
    forms = [form for form, ok in zip(ANSWER_FORMS, trial.accepted, strict=True) if all(ok)]
    shown = " or ".join(form.replace("{answer}", "…").rstrip(".") for form in forms)
    says = f"{trial.summary()}; written as {shown}" if shown else trial.summary()
    return Finding(level="ok", about=about, says=says)


def _believing(about: str, trial: _Trial) -> Finding:
    """A reward that accepts the answers of other rows."""
    details = [
        f"{location(trial.rows[n])}: expected "
        f"{shortened(str(trial.rows[n].metadata['answer']), 40)}, accepted "
        f"{shortened(trial.decoys[n] or '', 40)}"
        for n in trial.believed[:3]
    ]
    details.append(
        "the answers of other rows were tried; one value written in two ways is not a mistake"
    )
    return Finding(level="warn", about=about, says=trial.summary(), details=details, code="F51")


def _refusing(about: str, says: str, refused: Sequence[Preview]) -> Finding:
    """A reward that does not accept the answers of these rows."""
    fix = (
        "give the final answer alone in the rows, or set the reward's options: "
        "rlcli show shows them"
    )
    return Finding(
        level="FAIL",
        about=about,
        says=says,
        details=[
            f"{location(row)}: {shortened(str(row.metadata['answer']), 60)}" for row in refused[:3]
        ],
        fix=fix,
        code="F51",
        exit_code=4,
    )


def _highest(scores: Sequence[float | None]) -> float | None:
    return max((score for score in scores if score is not None), default=None)


def _scores(
    interface: Any, responses: Sequence[str], rows: Sequence[Preview]
) -> list[float | None]:
    return list(interface.score_texts(responses, [row.metadata["answer"] for row in rows]))


def _above(score: float | None, base: float | None) -> bool:
    return score is not None and score > (base if base is not None else score - 1)


def _above_each(scores: Sequence[float | None], bases: Sequence[float | None]) -> list[bool]:
    return [_above(score, base) for score, base in zip(scores, bases, strict=True)]


def _written(form: str, answers: Sequence[str | None]) -> list[str]:
    return [form.replace("{answer}", answer or "") for answer in answers]


def _another(golds: Sequence[str], number: int) -> str | None:
    """The answer of the next row whose answer differs."""
    answer = golds[number]
    others = (golds[(number + step) % len(golds)] for step in range(1, len(golds)))
    return next((candidate for candidate in others if candidate.strip() != answer.strip()), None)
