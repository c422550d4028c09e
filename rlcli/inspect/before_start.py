"""Checks made before a run, and the runs that it starts from, begin: all problems in one report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import DataError, ResourceError, RlcliError, raise_all
from rlcli.inspect.constructors import component_faults

if TYPE_CHECKING:
    from rlcli.inspect.rows import OpenDataset
    from rlcli.recipe.resolve import Resolved

READ_WHOLE = 32 << 20
"""Bytes. Of a larger dataset file only the first rows are read here;
the workers read all of it anyway."""
FIRST_ROWS = 1000


def check_before_start(
    resolved: Resolved,
    run_dir: Path | None,
    runs_first: Sequence[Resolved],
    warn: Callable[[str], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> None:
    """Check the libraries, models, data, folders and disk of a recipe and of those that must run
    before it; with `warn` also some of their rows. `note` gets how datasets read their rows.
    Loads no model and makes no folder. Raises RlcliError with all problems found."""
    from rlcli.inspect.model_files import model_faults
    from rlcli.recipe.requirements_here import missing_here

    errors: list[RlcliError] = []
    opened: list[tuple[Resolved, dict[str, OpenDataset]]] = []
    for run in (*runs_first, resolved):
        missing, models = list(missing_here(run)), list(model_faults(run))
        errors += [*missing, *models]
        if not models:  # rows cannot be judged with a broken tokenizer
            reported = {error.what for error in missing}
            datasets, faults = _open_datasets(run)
            errors += (error for error in faults if error.what not in reported)
            opened.append((run, datasets))
    errors += _folder_faults(resolved, run_dir, is_sized=len(opened) > len(runs_first))
    raise_all(errors)
    raise_all(error for run in (*runs_first, resolved) for error in component_faults(run))
    for run, datasets in opened:
        if warn is not None:
            _look_at_rows(run, datasets, warn)
        if note is not None:
            _pass_on_notes(datasets, note)


def _pass_on_notes(datasets: dict[str, OpenDataset], note: Callable[[str], None]) -> None:
    for name, dataset in datasets.items():
        for line in dataset.notes:
            note(f"{name}: {line}")


def _look_at_rows(
    resolved: Resolved, datasets: dict[str, OpenDataset], warn: Callable[[str], None]
) -> None:
    """Raise RlcliError if some rows show that the run would fail or learn nothing."""
    from rlcli.inspect.checklist import quick_checks
    from rlcli.inspect.findings import as_error

    findings = list(quick_checks(resolved, datasets))
    raise_all(
        as_error(finding, "--no-check trains anyway")
        for finding in findings
        if finding.level == "FAIL"
    )
    for finding in findings:
        if finding.level == "warn":
            warn(f"{finding.about}: {finding.says}{f'; {finding.fix}' if finding.fix else ''}")


def _open_datasets(resolved: Resolved) -> tuple[dict[str, OpenDataset], list[RlcliError]]:
    """The datasets that can be read without torch and transformers, and their errors; the workers
    open the others."""
    from rlcli.checkpoint.light_tokenizer import NotLight
    from rlcli.inspect.rows import Tokenizers, is_light, open_dataset
    from rlcli.recipe.dataset_sizes import check_dataset_sizes

    tokenizers = Tokenizers(resolved, only_light=True)
    recipe = resolved.recipe
    opened: dict[str, OpenDataset] = {}
    faults: list[RlcliError] = []
    for name in recipe.used_datasets:
        component = recipe.datasets[name]
        try:
            if is_light(recipe, name):
                few = _first_rows(component.type, component.args)
                dataset = open_dataset(resolved, name, tokenizers, few)
                if not few:
                    check_dataset_sizes(recipe, {name: dataset.rows})
                opened[name] = dataset
        except NotLight:
            continue
        except RlcliError as error:
            faults.append(_with_place(resolved, name, error))
    return opened, faults


def _first_rows(dataset: str, args: dict[str, Any]) -> dict[str, Any]:
    """Arguments with which a dataset reads only the first rows of a large file."""
    from rlcli.recipe.components import signature_of

    path = args.get("path")
    try:
        is_large = isinstance(path, str) and os.stat(Path(path).expanduser()).st_size > READ_WHOLE
    except OSError:
        return {}
    knows = any(
        argument.name == "max_rows" for argument in signature_of("datasets", dataset).arguments
    )
    return (
        {"max_rows": min(args.get("max_rows") or FIRST_ROWS, FIRST_ROWS)}
        if is_large and knows
        else {}
    )


def _with_place(resolved: Resolved, name: str, error: RlcliError) -> RlcliError:
    """The error, with the dataset's place in the recipe if it names none."""
    if error.where is not None or not isinstance(error, DataError):
        return error
    location = resolved.origin(("datasets", name, "args", "path"))
    return DataError(error.what, where=str(location), hint=error.hint, code=error.code)


def _folder_faults(
    resolved: Resolved, run_dir: Path | None, *, is_sized: bool
) -> Iterator[RlcliError]:
    """Check that the run has a folder of its own that can be made, and if its models' sizes can be
    believed, with enough disk space for what it keeps."""
    from rlcli.checkpoint.disk import check_free_space
    from rlcli.observe.run_directory import check_new_folder
    from rlcli.topology.report import make_plan

    log_dir = Path(resolved.recipe.log.dir).expanduser()
    folder = (
        run_dir.absolute() if run_dir is not None else log_dir.absolute() / resolved.recipe.name
    )
    for role, section in resolved.recipe.models.items():
        model = Path(section.path).expanduser() if section.path is not None else None
        if (
            run_dir is not None
            and model is not None
            and model.is_dir()
            and folder.is_relative_to(model.resolve())
        ):
            message = f"{folder} is in the folder of models.{role}.path, which is only read"
            yield ResourceError(
                message, where="--run-dir", hint="choose another --run-dir", code="R69"
            )
    try:
        check_new_folder(folder, is_run=run_dir is not None)
        needed = make_plan(resolved).storage.needed if is_sized else None
        if needed is not None:
            check_free_space(folder, needed, "what the run keeps")
    except ResourceError as error:
        yield error
