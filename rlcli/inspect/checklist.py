"""`rlcli check`: checks a recipe on its own rows and files, before any model is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.data import Preview
from rlcli.api.token_texts import id_count
from rlcli.errors import ModelError, RlcliError
from rlcli.files import known_object
from rlcli.inspect.constructors import component_faults
from rlcli.inspect.devices import visible_gpus
from rlcli.inspect.doubtful import recipe_warnings
from rlcli.inspect.findings import Finding, failure, without_torch
from rlcli.inspect.length_checks import check_answers, check_lengths, check_taught
from rlcli.inspect.memory_fit import check_memory_plan
from rlcli.inspect.model_files import check_model_files, faults_beyond_roles
from rlcli.inspect.packing import check_packing
from rlcli.inspect.reward_checks import check_reward, scores_responses, scores_texts, try_reward
from rlcli.inspect.row_checks import (
    RowLimits,
    check_ends,
    check_leak,
    check_mask,
    check_pairs,
    check_repeats,
    check_rows,
)
from rlcli.inspect.rows import OpenDataset, OpenTokenizer, Tokenizers, open_dataset, open_tokenizer
from rlcli.inspect.template_checks import check_template
from rlcli.recipe.components import holds_pairs
from rlcli.recipe.dataset_sizes import check_dataset_sizes
from rlcli.recipe.lengths import cache_of, kept_together
from rlcli.recipe.requirements_here import libraries_to_install, variables_to_set
from rlcli.recipe.role_sources import prompt_role, tokenizer_source, weights_origin
from rlcli.recipe.warm_start import warm_starts
from rlcli.units import grouped, grouped_count

if TYPE_CHECKING:
    from rlcli.api.architecture import Architecture
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Call


class _Subject:
    """A recipe, and what several checks need to know about it."""

    def __init__(self, resolved: Resolved):
        self.resolved = resolved
        self.recipe = resolved.recipe
        self.tokenizers = Tokenizers(resolved)
        self.datasets: dict[str, OpenDataset] = {}
        """Those of its datasets that are inspected."""
        self.rows: dict[str, Sequence[Preview]] = {}
        """Dataset → those of its rows that are inspected."""
        self._sizes: dict[str, Architecture | str] = {}

    def inspect(self, dataset: OpenDataset, rows: int) -> None:
        """Add a dataset with up to so many of its rows."""
        self.rows[dataset.name] = dataset.sample(rows)
        self.datasets[dataset.name] = dataset

    def sizes(self, role: str) -> Architecture | str:
        """The sizes of a role's model, or why they are unknown."""
        from rlcli.topology.configs import architecture_of

        origin = weights_origin(self.recipe, role)
        if origin not in self._sizes:
            self._sizes[origin] = architecture_of(self.resolved, origin)
        return self._sizes[origin]

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        """Tokens at which responses end."""
        return frozenset({tokenizer.eos_token_id, *self.recipe.generation.build().stop_token_ids})


def preflight(resolved: Resolved, rows: int = 200) -> Iterator[Finding]:
    """Everything that can be checked without loading a model,
    on up to `rows` rows of each dataset."""
    return without_torch(_findings(_Subject(resolved), rows))


def _findings(subject: _Subject, rows: int) -> Iterator[Finding]:
    resolved = subject.resolved
    yield _check_recipe(resolved)
    libraries, variables = list(libraries_to_install(resolved)), list(variables_to_set(resolved))
    missing = [*libraries, *variables]
    yield from (failure("library", error) for error in libraries)
    yield from (failure("variable", error) for error in variables)
    yield from _check_models(subject)
    yield from _open_datasets(subject, rows, {error.what for error in missing})
    if subject.datasets:
        yield from _check_tokenizer(subject, next(iter(subject.datasets.values())).tokenizer)
    yield from _check_rows(subject)
    components = [] if missing else list(_check_components(resolved))
    # otherwise the same fault would be reported again
    if not any(finding.level == "FAIL" for finding in components):
        yield from _check_rewards(subject)
    yield from _check_held_out(subject)
    yield from _check_taught(subject, rows)
    yield from components
    yield from _check_machine(subject)
    yield from _check_doubtful(resolved)


def _open_datasets(subject: _Subject, rows: int, reported: set[str]) -> Iterator[Finding]:
    """Open every dataset of the recipe; a failure for each that cannot be read, unless it has been
    reported already."""
    resolved = subject.resolved
    for name in resolved.recipe.datasets:
        try:
            opened = open_dataset(resolved, name, subject.tokenizers)
            check_dataset_sizes(resolved.recipe, {name: opened.rows})
            subject.inspect(opened, rows)
        except RlcliError as error:
            # A tokenizer that cannot be read is one failure, however many datasets need it.
            if error.what not in reported:
                yield failure(name, error)
            reported.add(error.what)


def inspect_rows(resolved: Resolved, names: Collection[str], rows: int = 200) -> Iterator[Finding]:
    """What up to `rows` rows of these datasets show, and whether held-out rows are trained on.
    Raises RlcliError for one that cannot be opened."""
    subject = _Subject(resolved)
    for dataset in [open_dataset(resolved, name, subject.tokenizers) for name in names]:
        subject.inspect(dataset, rows)
    yield from _check_rows(subject)
    yield from _check_held_out(subject)
    yield from _check_taught(subject, rows)


def quick_checks(
    resolved: Resolved, datasets: Mapping[str, OpenDataset], rows: int = 50
) -> Iterator[Finding]:
    """What up to `rows` rows of already open datasets show: masks, ends, lengths,
    templates, rewards."""
    subject = _Subject(resolved)
    for dataset in datasets.values():
        subject.inspect(dataset, rows)
    yield from _check_rows(subject)
    yield from _check_rewards(subject)
    yield from _check_memory(subject)
    yield from _check_doubtful(resolved)


def _check_rows(subject: _Subject) -> Iterator[Finding]:
    for name, opened in subject.datasets.items():
        yield from _check_dataset(subject, opened, subject.rows[name])


def _check_recipe(resolved: Resolved) -> Finding:
    from rlcli.recipe.warm_start import chain

    first = [source.recipe.name for source in chain(resolved)]
    after = f"; runs after {', '.join(first)}" if first else ""
    layers = grouped_count(len(resolved.layers), "layer")
    values = grouped_count(resolved.values_set, "value")
    return Finding(level="ok", about="recipe", says=f"{layers}, {values} set, 0 unknown{after}")


def _check_components(resolved: Resolved) -> Iterator[Finding]:
    """Whether each interface and backend accepts its arguments together,
    also in the recipes that run first."""
    from rlcli.recipe.warm_start import chain

    faults = [error for run in (*chain(resolved), resolved) for error in component_faults(run)]
    yield from (failure("arguments", error) for error in faults)
    if not faults:
        yield Finding(level="ok", about="arguments", says="accepted by every interface and backend")


# -- models ----------------------------------------------------------------------------------------


def _check_models(subject: _Subject) -> Iterator[Finding]:
    """The files of every role that brings weights of its own."""
    for name, role in subject.recipe.models.items():
        if role.init is not None or not role.has_weights:
            continue
        about = f"model {name}"
        try:
            check_model_files(subject.resolved, name)
            yield _describe_model(subject, name, about)
        except RlcliError as error:
            yield failure(about, error)
    yield from (failure("models", error) for error in faults_beyond_roles(subject.resolved))


def _describe_model(subject: _Subject, name: str, about: str) -> Finding:
    sizes, role = subject.sizes(name), subject.recipe.models[name]
    if isinstance(sizes, str):
        return Finding(level="skip", about=about, says=sizes)
    start = "random weights" if role.scratch is not None else role.path or ""
    if role.warm_start is not None:
        start = "the result of {}, role {}".format(*role.warm_start)
    reach = f", {grouped(sizes.positions)} positions" if sizes.positions else ""
    says = f"{sizes.model_type}, {grouped(sizes.vocabulary)} rows in the embedding{reach}; {start}"
    return Finding(level="ok", about=about, says=says)


def _check_tokenizer(subject: _Subject, opened: OpenTokenizer) -> Iterator[Finding]:
    """Whether the embedding has a row for each token, and how padding and stop tokens are set."""
    recipe, role = subject.recipe, prompt_role(subject.recipe)
    yield _fits(subject, role, "tokenizer", opened)
    others = {
        tokenizer_source(recipe, name): name
        for name, section in recipe.models.items()
        if section.has_weights
    }
    for source, name in others.items():
        if source in (tokenizer_source(recipe, role), opened.source) or source.startswith(
            "recipe:"
        ):
            continue
        try:
            yield _fits(subject, name, f"tokenizer {name}", open_tokenizer(source))
        except RlcliError as error:
            yield failure(f"tokenizer {name}", error)


def _fits(subject: _Subject, role: str, about: str, opened: OpenTokenizer) -> Finding:
    tokenizer, rows = opened.tokenizer, _embedding_rows(subject, role)
    ids = id_count(tokenizer)
    tokens = grouped(ids)
    if rows is not None and ids > rows:
        message = f"it has {tokens} tokens, but the embedding of {role} has {grouped(rows)} rows"
        hint = "use the tokenizer that the model was made with"
        return failure(about, ModelError(message, hint=hint, code="F32"))
    details: list[str] = []
    if opened.heavy_because:
        details.append(f"read by transformers, not by its file alone: {opened.heavy_because}")
    unheard = _unheard_stops(subject, role, tokenizer)
    if unheard:
        names = ", ".join(tokenizer.decode([id_]) for id_ in unheard)
        return Finding(
            level="warn",
            about=about,
            says=f"generation_config.json also stops at {names}; this recipe does not",
            details=details,
            fix=f"set generation.stop_token_ids={unheard}",
            code="F32",
        )
    says = f"{tokens} tokens{_about_embedding(tokenizer, rows)}"
    return Finding(level="ok", about=about, says=says, details=details)


def _embedding_rows(subject: _Subject, role: str) -> int | None:
    sizes = subject.sizes(role)
    return None if isinstance(sizes, str) else sizes.vocabulary


def _about_embedding(tokenizer: Any, rows: int | None) -> str:
    """What there is to say about the rows of the embedding, if known, and about padding."""
    rows_text = f", a row of the embedding for each ({grouped(rows)})" if rows is not None else ""
    is_same = tokenizer.pad_token_id == tokenizer.eos_token_id
    padding = "; pad is the end of sequence, which is harmless: nothing is padded"
    return rows_text + padding if is_same else rows_text


def _unheard_stops(subject: _Subject, role: str, tokenizer: Any) -> list[int]:
    """Ids at which the model's own generation settings stop, but a run of this recipe continues."""
    path = subject.recipe.models[role].path
    file = Path(path).expanduser() / "generation_config.json" if path is not None else None
    if file is None or not file.is_file() or not _generates(subject.recipe.graph):
        return []
    # a file that cannot be read is reported with the model
    end = known_object(file).get("eos_token_id")
    ids = end if isinstance(end, list) else [end]
    return [id_ for id_ in ids if isinstance(id_, int) and id_ not in subject.stop_ids(tokenizer)]


# -- rows ------------------------------------------------------------------------------------------


def _check_dataset(
    subject: _Subject, opened: OpenDataset, rows: Sequence[Preview]
) -> Iterator[Finding]:
    tokenizer = opened.tokenizer.tokenizer
    limits = _limits(subject, opened.name, tokenizer)
    yield check_rows(opened, rows)
    pairs = rows if holds_pairs(subject.recipe.datasets, opened.name) else ()
    for finding in (
        check_pairs(opened.name, pairs),
        check_mask(opened.name, rows),
        check_ends(opened.name, tokenizer, rows, limits),
        check_template(opened.name, tokenizer, rows, limits),
        *check_lengths(opened, rows, limits),
        check_answers(opened.name, tokenizer, rows, limits),
        check_packing(subject.recipe, opened, rows, limits),
        check_repeats(opened, rows),
    ):
        if finding is not None:
            yield finding


def _limits(subject: _Subject, dataset: str, tokenizer: Any) -> RowLimits:
    recipe, sizes = subject.recipe, subject.sizes(prompt_role(subject.recipe))
    is_trained_on = dataset == recipe.train.dataset
    is_held_out = dataset == recipe.train.eval.dataset
    generates = (is_trained_on and _generates(recipe.graph)) or (
        is_held_out and _generates(recipe.train.eval.graph)
    )
    settings = recipe.generation.build()
    positions = None if isinstance(sizes, str) else sizes.positions
    responses = 1
    if generates and is_trained_on:
        responses = kept_together(recipe, settings.responses_per_prompt)
    return RowLimits(
        stop_ids=subject.stop_ids(tokenizer),
        new_tokens=settings.max_new_tokens if generates else 0,
        responses=responses,
        positions=positions,
        microbatch=recipe.train.max_tokens_per_microbatch,
        cache=cache_of(recipe, prompt_role(recipe)),
    )


def _generates(graph: Mapping[str, Call]) -> bool:
    return any(call.call == "generate" for call in graph.values())


def _check_held_out(subject: _Subject) -> Iterator[Finding]:
    datasets = subject.datasets
    train, held_out = subject.recipe.train.dataset, subject.recipe.train.eval.dataset
    if held_out is not None and held_out != train and {train, held_out} <= set(datasets):
        yield check_leak(datasets[train], datasets[held_out], subject.rows)


def _check_taught(subject: _Subject, rows: int) -> Iterator[Finding]:
    """Whether responses have room for the answers that their model learned to write in the recipe
    that it starts from."""
    recipe = subject.recipe
    starts = {start.role: start.source for start in warm_starts(subject.resolved)}
    source = starts.get(weights_origin(recipe, prompt_role(recipe)))
    if source is None or not _generates(recipe.graph):
        return
    try:
        answers = open_dataset(source, source.recipe.train.dataset).sample(rows)
    except RlcliError:  # reported where that recipe is checked
        return
    new_tokens = recipe.generation.build().max_new_tokens
    finding = check_taught(source.recipe.name, answers, new_tokens)
    if finding is not None:
        yield finding


# -- rewards and devices ---------------------------------------------------------------------------


def _check_rewards(subject: _Subject) -> Iterator[Finding]:
    """Each reward that needs no model, on the rows that it will receive."""
    recipe, datasets, rows = subject.recipe, subject.datasets, subject.rows
    graphs = [(recipe.train.dataset, recipe.graph)]
    if recipe.train.eval.dataset is not None:
        graphs.append((recipe.train.eval.dataset, recipe.train.eval.graph))
    for dataset, graph in graphs:
        for name, call in graph.items():
            if not rows.get(dataset):
                continue
            if scores_texts(call):
                yield check_reward(name, call, rows[dataset])
            elif scores_responses(recipe, call):
                yield try_reward(name, call, datasets[dataset].tokenizer.tokenizer, rows[dataset])


def _check_doubtful(resolved: Resolved) -> Iterator[Finding]:
    for warning in recipe_warnings(resolved):
        yield Finding(level="warn", about="recipe", says=warning)


def _check_machine(subject: _Subject) -> Iterator[Finding]:
    yield _check_devices(subject.resolved)
    yield from _check_memory(subject)


def _check_memory(subject: _Subject) -> Iterator[Finding]:
    roles = subject.recipe.models.items()
    sizes = {name: subject.sizes(name) for name, role in roles if role.has_weights}
    with suppress(RlcliError, ValueError):  # without a layout there is nothing to compare
        finding = check_memory_plan(subject.recipe, sizes)
        if finding is not None:
            yield finding


def _check_devices(resolved: Resolved) -> Finding:
    cluster = resolved.recipe.cluster
    if cluster.device == "cpu":
        return Finding(level="ok", about="devices", says="the recipe runs on the CPU")
    gpus = visible_gpus()
    if not gpus:
        fate = (
            "this recipe would run on the CPU"
            if cluster.device == "auto"
            else "they run when the job starts on the cluster"
        )
        return Finding(level="skip", about="GPU checks", says=f"no GPU here; {fate}")
    says = f"{len(gpus)} x {gpus[0].name}, {gpus[0].free_gib:.1f} GiB free on the first"
    if len(gpus) < cluster.devices_per_node:
        return Finding(
            level="warn",
            about="devices",
            says=f"{says}; the recipe needs {cluster.devices_per_node} per node",
            fix=f"set cluster.devices_per_node={len(gpus)} to run it here",
            code="R50",
        )
    return Finding(level="ok", about="devices", says=says)
