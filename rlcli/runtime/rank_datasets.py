"""The datasets whose rows a rank loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlcli import registry
from rlcli.api.data import DatasetUtility, SequenceSample
from rlcli.api.key_meaning import ATTEMPT
from rlcli.messaging.messages import Fields
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.role_sources import prompt_role
from rlcli.recipe.schema import Recipe
from rlcli.runtime.data_order import (
    StreamRows,
    by_number,
    dataset_of,
    described_rows,
    location_of_sample,
    read_row,
    row_of,
)
from rlcli.runtime.roles import role_tokenizer
from rlcli.topology import Topology


class RankDatasets:
    """Rank 0 opens every dataset in use; the others those whose rows they load."""

    def __init__(self, recipe: Recipe, topology: Topology, rank: int):
        self._recipe = recipe
        self._topology = topology
        self._rank = rank
        self.tokenizer: Any = None
        """With which prompts are read."""
        self.opened: dict[str, Any] = {}

    def open(self) -> Fields:
        """On rank 0, the row counts and digests of the datasets; elsewhere nothing."""
        self.tokenizer = role_tokenizer(self._recipe, prompt_role(self._recipe))
        described = self._recipe.described_datasets
        util = DatasetUtility(self._recipe.seed, 0, 1, self.tokenizer, described)
        datasets = {
            name: registry.make_dataset(described[name], replace(util, name=name))
            for name in self._recipe.used_datasets
            if self._rank == 0 or self._takes_rows(name)
        }
        self.opened = {name: by_number(dataset, name) for name, dataset in datasets.items()}
        return described_rows(datasets) if self._rank == 0 else {}

    def _takes_rows(self, dataset: str) -> bool:
        """Rows go to the ranks of the first call of a graph."""
        recipe, train = self._recipe, self._recipe.train
        graphs = [train_graph(recipe)] if dataset == train.dataset else []
        graphs += [eval_graph(recipe)] if dataset == train.eval.dataset else []
        readers = [self._topology.placement(graph[0].model_name) for graph in graphs]
        return any(self._rank in placement.ranks for placement in readers)

    def load(
        self, dataset: str, rows: Sequence[Sequence[Any]], device: torch.device
    ) -> tuple[list[SequenceSample], Fields]:
        """The samples of rows, given as (id, row, attempt), and the dataset's ids for them. If a
        stream ended before some of them, also which are missing and how many rows it has."""
        source, samples, names = self.opened[dataset], [], {}
        for id_, row, attempt in rows:
            read = read_row(source, dataset, id_, row)
            if read is not None:
                sample = read.to(device)  # does not share the dataset's lists
                names[id_] = str(sample.ids[0])
                sample.ids = [id_]
                sample.metadata = {**sample.metadata, ATTEMPT: [attempt]}
                samples.append(sample)
        missing = [id_ for id_, *_ in rows if id_ not in names]
        length = getattr(source, "length", None)
        return samples, {"names": names, "missing": missing, "length": length}

    def name_of_sample(self, id_: Any) -> str:
        """`row-17 (row 17 of dataset train)`: the dataset's name for a sample,
        and its position there."""
        location = location_of_sample(self._recipe, str(id_))
        source = self.opened.get(dataset_of(self._recipe, str(id_)))
        if source is None or isinstance(source, StreamRows):
            return location
        return f"{source[row_of(str(id_))[1]].ids[0]} ({location})"
