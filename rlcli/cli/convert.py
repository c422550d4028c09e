"""`rlcli convert`: models of a run to Hugging Face folders, and back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.api.headway import BYTES, doing
from rlcli.cli.arguments import AsJson, DryRun, RoleName, StepNumber
from rlcli.cli.output import print_json, print_text, wrapped
from rlcli.errors import UsageError
from rlcli.observe.run_search import named_folder
from rlcli.units import count, size

if TYPE_CHECKING:
    from rlcli.checkpoint.conversion_check import ConversionReport
    from rlcli.checkpoint.convert import Conversion
    from rlcli.checkpoint.role_folders import RoleFolder


class Type(StrEnum):
    """Data types of the written weights."""

    KEEP = "keep"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Rows(StrEnum):
    """How to treat an embedding's rows beyond the vocabulary."""

    DROP = "drop"
    KEEP = "keep"


def convert(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE", help="A run, a checkpoint, or the folder of a model in it."
        ),
    ] = None,
    to_hf: Annotated[
        Path | None,
        typer.Option("--to-hf", metavar="DIR", help="Write a folder that transformers can read."),
    ] = None,
    from_hf: Annotated[
        Path | None, typer.Option("--from-hf", metavar="DIR", help="Read a Hugging Face folder.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="With --from-hf: the folder to write."),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", help="With --from-hf: how many ranks share it.")
    ] = 1,
    role: RoleName = None,
    step: StepNumber = None,
    dtype: Annotated[Type, typer.Option("--dtype", help="Data type of the weights.")] = Type.KEEP,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, such as 500MB.")
    ] = "5GB",
    vocab_padding: Annotated[
        Rows, typer.Option("--vocab-padding", help="Rows of the embedding beyond the vocabulary.")
    ] = Rows.DROP,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Load both models; compare names, shapes and logits."
        ),
    ] = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a trained model to Hugging Face's format, or the other way round.

    Weights are read and written a few tensors at a time, whatever the size of the model.

    Example: rlcli convert runs/ppo_math/20260412-093011 --to-hf out/model
    """
    from rlcli.checkpoint import convert as conversions
    from rlcli.checkpoint.role_folders import check_digests, find_role

    started = time.monotonic()
    source_role = find_role(named_folder(_only(source, to_hf, from_hf, to)), role, step)
    target = to_hf or to
    assert target is not None
    conversions.refuse_existing(target)
    if verify and not dry_run:
        check_digests(source_role)
    new_dtype = None if dtype is Type.KEEP else dtype.value
    if to_hf is not None:
        largest = conversions.parse_size(max_shard_size)
        plan = conversions.plan_to_hf(
            source_role.folder, to_hf, dtype=new_dtype, largest=largest, padding=vocab_padding.value
        )
    else:
        plan = conversions.plan_from_hf(source_role.folder, target, ranks=ranks, dtype=new_dtype)
    if not as_json:
        _say(_planned(plan, source_role, dry_run))
    checked, peak = (None, _peak()) if dry_run else _convert(plan, verify)
    seconds = time.monotonic() - started
    if as_json:
        numbers = {"seconds": round(seconds, 3), "peak_bytes": peak}
        print_json(_as_json(plan, source_role, checked, dry_run) | numbers)
    elif not dry_run:
        _say(_checked(plan, source_role, checked))
        _say([_done(seconds, peak, checked is not None)])


def _convert(plan: Conversion, verify: bool) -> tuple[ConversionReport | None, int]:
    """The result of the check, if there was one, and the peak memory before it."""
    from rlcli.checkpoint import convert as conversions

    results: list[ConversionReport] = []
    peaks: list[int] = []

    def check(folder: Path) -> None:
        peaks.append(_peak())
        with doing("loading both models to compare them"):
            from rlcli.checkpoint.conversion_check import check_conversion

            results.append(check_conversion(plan, folder))

    with doing(f"writing {plan.target}", plan.bytes, BYTES) as work:
        conversions.convert(plan, work.advance, check if verify else None)
    return (results[0], peaks[0]) if verify else (None, _peak())


def _only(source: Path | None, to_hf: Path | None, from_hf: Path | None, to: Path | None) -> Path:
    """The folder to read. Raises UsageError unless the arguments are unambiguous."""
    example = "rlcli convert RUN --to-hf DIR, or rlcli convert --from-hf DIR --to DIR --ranks 2"
    if to_hf is not None and from_hf is None and to is None:
        if source is None:
            raise UsageError(
                "rlcli convert --to-hf needs SOURCE: a run, a checkpoint, or a model's folder",
                hint=example,
            )
        return source
    if from_hf is not None and to is not None and to_hf is None:
        if source is not None:
            raise UsageError(
                f"unexpected argument {source}: --from-hf names the folder to read", hint=example
            )
        return from_hf
    raise UsageError("rlcli convert needs either --to-hf, or --from-hf and --to", hint=example)


def _planned(plan: Conversion, source: RoleFolder, dry_run: bool) -> Iterator[str]:
    dtypes = sorted({tensor.spec.dtype.lower() for move in plan.moves for tensor in move.sources})
    files = count(plan.source_files, "sharded file" if plan.source_is_sharded else "whole file")
    yield f"reading  {source.folder}: {files}, {plan.model_type}, {'+'.join(dtypes)}"
    for note in plan.notes:
        yield f"note     {note}"
    yield _writing(plan, dry_run)


def _writing(plan: Conversion, dry_run: bool) -> str:
    names = {relative.name for relative in plan.accompanying} | {"config.json"}
    shown = {
        "config": {"config.json"},
        "generation config": {"generation_config.json"},
        "tokenizer": {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"},
        "chat template": {"chat_template.jinja"},
    }
    along = [label for label, files in shown.items() if files & names]
    verb = "would be" if dry_run else "writing "
    types = "+".join(plan.dtypes).lower()
    weights = f"{len(plan.files)} safetensors ({size(plan.bytes)}, {types})"
    return f"{verb} {plan.target}: {', '.join([weights, *along])}"


def _checked(
    plan: Conversion, source: RoleFolder, result: ConversionReport | None
) -> Iterator[str]:
    if result is None:
        yield "not checked (--no-verify)"
        return
    tied = "tied" if result.tied else "untied"
    shapes = f"{result.tensors}/{len(plan.outputs)}"
    yield f"checking names and shapes {shapes} · embeddings {tied} as in the source · no NaN"
    origin = "training checkpoint" if source.checkpoint is not None else "source"
    rounded = f" rounded to {plan.dtypes[0].lower()}" if _is_rounded(plan) else ""
    yield f"         all {result.parameters} parameters equal those of the {origin}{rounded}"
    yield (
        f"         outputs on {result.prompts} prompts: max diff {result.max_difference} against "
        f"the {origin}{rounded}"
    )


def _is_rounded(plan: Conversion) -> bool:
    return any(
        move.sources[0].spec.dtype != spec.dtype for move in plan.moves for spec in move.outputs
    )


def _as_json(
    plan: Conversion, source: RoleFolder, checked: ConversionReport | None, dry_run: bool
) -> dict[str, Any]:
    return {
        "ok": True,
        "source": str(source.folder),
        "role": source.role,
        "step": source.step,
        "target": str(plan.target),
        "model_type": plan.model_type,
        "written": not dry_run,
        "files": [file.name for file in plan.files],
        "tensors": len(plan.outputs),
        "bytes": plan.bytes,
        "dtypes": list(map(str.lower, plan.dtypes)),
        "notes": list(plan.notes),
        "verified": asdict(checked) if checked else None,
    }


def _done(seconds: float, peak: int, is_checked: bool) -> str:
    before = " before the check" if is_checked else ""
    return f"done     in {_duration(seconds)}, peak memory {size(peak)}{before}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _peak() -> int:
    """Peak memory of this process, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _say(lines: Iterable[str]) -> None:
    """Print lines whose second column begins after their first word and wraps below itself."""
    for line in lines:
        print_text(wrapped(line, rest=" " * 9))
