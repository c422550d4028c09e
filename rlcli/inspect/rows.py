"""Opens datasets and tokenizers for inspection: without torch and transformers,
where they allow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli import registry
from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility, Preview, Survey
from rlcli.api.dataset import is_stream
from rlcli.api.preview import preview_of
from rlcli.api.quiet_logs import quiet
from rlcli.errors import DataError, ModelError, RlcliError, first_line
from rlcli.recipe.components import with_sources
from rlcli.recipe.role_sources import prompt_role, tokenizer_role, tokenizer_source

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe


FIRST = 256
"""Rows of a stream that are inspected."""


TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Patterns of the files of tokenizers."""


@dataclass(frozen=True)
class OpenTokenizer:
    """A tokenizer, and how it was opened."""

    tokenizer: Any
    """A `LightTokenizer`, or one of transformers, which can do the same and more."""
    source: str
    """Folder, Hub id or `builtin:<name>`."""
    heavy_because: str | None = None
    """Why transformers had to read it."""


@dataclass(frozen=True)
class OpenDataset:
    """A dataset of a recipe."""

    name: str
    type: str
    dataset: Any
    tokenizer: OpenTokenizer
    survey: Survey | None
    """What it knows about all its rows, if it reports that."""
    is_stream: bool = False
    """Its rows here are the first of a stream."""

    @property
    def rows(self) -> int | None:
        """How many it has; None for a stream."""
        return None if self.is_stream else len(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def preview(self, index: int) -> Preview:
        """Row `index`, counted from 0, by the dataset's own preview or else by its sample.
        Raises DataError."""
        try:
            if hasattr(self.dataset, "preview"):
                return self.dataset.preview(index)
            return preview_of(self.dataset[index])
        except RlcliError:
            raise
        except Exception as error:  # whatever a user's dataset raises
            raise DataError(
                (
                    f"row {index + 1} of dataset {self.name} cannot be read: "
                    f"{type(error).__name__}: {error}"
                ),
                code="F31",
            ) from error

    @property
    def notes(self) -> Sequence[str]:
        """Other facts about its rows, such as which were left out,
        or how much a mixture takes of each dataset."""
        return tuple(getattr(self.dataset, "notes", ()))

    @property
    def is_drawn(self) -> bool:
        """Whether its rows are drawn at random, one after another,
        so that the first are as good a sample as any."""
        return bool(getattr(self.dataset, "DRAWN", False))

    def sample(self, rows: int) -> list[Preview]:
        """At most `rows` rows: the first of a dataset that draws them,
        else spread evenly over it."""
        rows = min(rows, len(self))
        return [
            self.preview(number if self.is_drawn else number * len(self) // rows)
            for number in range(rows)
        ]


def is_light(recipe: Recipe, name: str) -> bool:
    """Whether a dataset, with those that it is made of,
    can be inspected without torch and transformers."""
    parts = [
        registry.load("datasets", recipe.datasets[source].type)
        for source in with_sources(recipe.datasets, name)
    ]
    return all(hasattr(dataset, "preview") for dataset in parts)


def open_dataset(
    resolved: Resolved,
    name: str,
    tokenizers: Tokenizers | None = None,
    overriding: Mapping[str, Any] | None = None,
) -> OpenDataset:
    """A dataset as the recipe's run would open it, with the `overriding` arguments instead of its
    own. Raises RlcliError."""
    component = resolved.recipe.datasets[name]
    tokenizer = (tokenizers or Tokenizers(resolved)).open(light=is_light(resolved.recipe, name))
    util = DatasetUtility(
        resolved.recipe.seed, 0, 1, tokenizer.tokenizer, resolved.recipe.described_datasets
    )
    try:
        with quiet("rlcli.datasets"):  # the report contains its warnings
            args = {**component.args, **(overriding or {})}
            described = DatasetAbstraction(component.type, args)
            dataset = registry.make_dataset(described, replace(util, name=name))
    except RlcliError:
        raise
    except Exception as error:  # whatever a user's dataset raises
        message = (
            f"dataset {name} ({component.type}) cannot be opened: {type(error).__name__}: {error}"
        )
        raise DataError(message, code="F31") from error
    if is_stream(dataset):
        return OpenDataset(
            name,
            component.type,
            list(islice(dataset.rows_from(0, 0), FIRST)),
            tokenizer,
            None,
            True,
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"dataset {name} ({component.type}) does not give rows by number")
    survey = dataset.survey() if hasattr(dataset, "survey") else None
    return OpenDataset(name, component.type, dataset, tokenizer, survey)


class Tokenizers:
    """The tokenizer that the datasets of a recipe are read with,
    opened once in each way that they need."""

    def __init__(self, resolved: Resolved, only_light: bool = False):
        """`only_light`: raise NotLight where transformers would have to read one."""
        self._resolved = resolved
        self._only_light = only_light
        self._opened: dict[bool, OpenTokenizer] = {}

    def open(self, *, light: bool) -> OpenTokenizer:
        """`light`: a light tokenizer is enough. Raises ModelError."""
        if light not in self._opened:
            source = _tokenizer_source(self._resolved, prompt_role(self._resolved.recipe))
            _refuse_without_tokenizer(self._resolved, Path(source).expanduser())
            self._opened[light] = open_tokenizer(source, light=light, only_light=self._only_light)
        return self._opened[light]


def _tokenizer_source(resolved: Resolved, role: str) -> str:
    """Source of the tokenizer, traced through warm starts that have not run yet."""
    source = tokenizer_source(resolved.recipe, role)
    if not source.startswith("recipe:"):
        return source
    from rlcli.observe.results import find_result
    from rlcli.recipe.warm_start import warm_starts

    owner = tokenizer_role(resolved.recipe, role)
    start = next(start for start in warm_starts(resolved) if start.role == owner)
    folder = find_result(start.source, resolved.recipe.log.dir, start.source_role)
    return str(folder) if folder is not None else _tokenizer_source(start.source, start.source_role)


def _refuse_without_tokenizer(resolved: Resolved, folder: Path) -> None:
    """Raise ModelError for a folder without any file that a tokenizer could be read from."""
    if not folder.is_dir() or any(file for name in TOKENIZER_FILES for file in folder.glob(name)):
        return
    role = tokenizer_role(resolved.recipe, prompt_role(resolved.recipe))
    raise ModelError(
        f"{folder} holds no tokenizer",
        where=str(resolved.origin(("models", role, "path"))),
        hint=f"name the folder or the Hub id of one: models.{role}.tokenizer=PATH",
    )


def open_tokenizer(source: str, *, light: bool = True, only_light: bool = False) -> OpenTokenizer:
    """The tokenizer of a folder, a Hub id or a `builtin:<name>`. Raises ModelError; with
    `only_light` also NotLight, where transformers would have to read it."""
    if source.startswith("builtin:"):
        return _builtin_tokenizer(source, light)
    from rlcli.api.model_folder import check_folder
    from rlcli.checkpoint.huggingface import load_tokenizer, with_end_token
    from rlcli.checkpoint.light_tokenizer import NotLight, read_light_tokenizer
    from rlcli.topology.configs import cached_folder

    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = cached_folder(source) or folder
    if not folder.is_dir() and only_light:
        raise NotLight("it is not on this machine yet")
    if not light or not folder.is_dir():
        why = (
            "the dataset may use any part of it"
            if folder.is_dir()
            else "it is not on this machine yet"
        )
        return OpenTokenizer(load_tokenizer(source), source, why)
    check_folder(folder, weights=False)
    try:
        return OpenTokenizer(with_end_token(read_light_tokenizer(folder), source), source)
    except NotLight as why_not:
        if only_light:
            raise
        return OpenTokenizer(load_tokenizer(source), source, str(why_not))
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelError(f"no tokenizer can be read from {source}: {first_line(error)}") from error


def _builtin_tokenizer(source: str, light: bool) -> OpenTokenizer:
    from rlcli.checkpoint.light_tokenizer import LightTokenizer

    maker: Any = registry.load("datasets", source.removeprefix("builtin:"))
    if light and hasattr(maker, "tokenizer_parts"):
        return OpenTokenizer(LightTokenizer(*maker.tokenizer_parts()), source)
    return OpenTokenizer(maker.make_tokenizer(), source, "it is made by transformers")
