"""ModelWorker: one per device. It owns its shards of one or more roles and the tensors that it
produced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcli.api.config import FinetuneSpec, ModelVersion
from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, OffloadHook
from rlcli.api.headway import heard_by
from rlcli.api.model import Model, ModelBackend, call_interface
from rlcli.api.output_checks import Origin, read_stats, versions, warn_of_changes
from rlcli.api.timing import apart
from rlcli.checkpoint.rank_files import (
    bytes_to_save,
    copy_roles,
    has_state,
    read_samples,
    restore_roles,
    write_roles,
    write_samples,
)
from rlcli.disk_errors import explain_disk_errors
from rlcli.garbage import collect_as_usual, keep_freed_memory
from rlcli.messaging.messages import END_LANE, LAST_REQUEST, Fields, Request, Tell
from rlcli.observe.responses import describe_samples
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.measured_arguments import Choice, with_choices
from rlcli.recipe.role_sources import followed_roles, stored_roles
from rlcli.recipe.schema import Recipe
from rlcli.registry.faults import attribute_user_errors, origin_of_call
from rlcli.runtime.call_outputs import NO_OUTPUT, accept_output, measured_by
from rlcli.runtime.data_lane import SampleStore
from rlcli.runtime.pausing import PausingEngine, pausing_engines
from rlcli.runtime.performance import CallPerformance, work_of
from rlcli.runtime.pool import PoolProcess, connect_pools
from rlcli.runtime.rank_checkpoints import verify_share, write_and_report
from rlcli.runtime.rank_counts import CountReporter
from rlcli.runtime.rank_datasets import RankDatasets
from rlcli.runtime.roles import (
    Interfaces,
    Meshes,
    build_roles,
    describe_role,
    seed_global_streams,
    wait_for_device,
)
from rlcli.runtime.weight_flow import WeightCopies
from rlcli.topology import Topology

OFFLOAD = "offload"
"""Kind of a span: weights go to the memory of the host."""
OPERATIONS = frozenset({
    "open_datasets", "measure", "build", "load_rows", "load_samples", "clear", "run_call",
    "copy_weights", "describe", "checkpoint", "verify", "restore", "save", END_LANE, LAST_REQUEST,
})  # fmt: skip
"""What the master may ask of a rank: methods of ModelWorker."""


class ModelWorker:
    """Answers the master's requests; `handle` is the only entry point."""

    _performance: CallPerformance
    _pausing: dict[str, PausingEngine]
    """Roles that generate in a lane of their own, and pause there for new weights."""

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        rank: int,
        device: torch.device,
        meshes: Meshes,
        report: Tell,
        run_dir: Path | None = None,
    ):
        keep_freed_memory(of_activations=device.type == "cpu")
        self.recipe = recipe
        self.topology = topology
        self.rank = rank
        self.device = device
        self.meshes = meshes
        self.report = report
        self.run_dir = run_dir
        training, evaluating = train_graph(recipe), eval_graph(recipe)
        self.calls = {mfc.name: mfc for mfc in (*training, *evaluating)}
        self.models: dict[str, Model] = {}
        self._backed: dict[str, tuple[Model, ModelBackend]] = {}
        self._pools: dict[str, PoolProcess] = {}
        """Role → the process that runs its calls for this rank, in a lane of its own."""
        self.datasets = RankDatasets(recipe, topology, rank)
        self._copies = WeightCopies(self.calls.values(), topology, rank, device)
        self._interfaces = Interfaces(training, evaluating)
        self._origins: dict[str, Origin] = {}
        """Call → the component at fault if it returns something unusable."""
        self.samples = SampleStore()
        """Samples held by this rank; its data lane reads from and adds to it."""

    def handle(self, request: Request) -> Fields:
        if request.op not in OPERATIONS:
            raise LookupError(f"a rank has no operation {request.op}")
        if self.device.type == "cuda":  # a thread begins with the first device
            torch.cuda.set_device(self.device)
        counts = CountReporter(self.report, request, self.topology.world_size)
        with attribute_user_errors(), heard_by(counts):
            return getattr(self, request.op)(**request.args)

    # -- starting ----------------------------------------------------------------------------------

    def open_datasets(self) -> Fields:
        """Open the datasets whose rows this rank loads. Rank 0 opens every dataset in use; it
        returns their row counts and digests."""
        return self.datasets.open()

    def measure(self, roles: Sequence[str]) -> Fields:
        """For those of `roles` that this rank holds, what their backends measure."""
        described = {
            role: describe_role(self.recipe, role, self.device)
            for role in self.topology.roles_on(self.rank)
            if role in roles
        }
        return {role: backend.measure(model) for role, (model, backend) in described.items()}

    def build(self, steps: int, rows: int, choices: Sequence[Fields] = ()) -> Fields:
        """Load this rank's roles and set up their engines, for a run of `steps` over `rows` of
        training data, with the measured `choices` in the recipe."""
        self.recipe = with_choices(self.recipe, [Choice(**choice) for choice in choices])
        self._load_roles(steps, rows)
        self._performance = CallPerformance(self.recipe, self.rank, self.device, self.run_dir)
        changing = self._held(self.recipe.changing_roles)
        stored = self._held(stored_roles(self.recipe))
        collect_as_usual()
        return {
            "without_state": [name for name, model in changing.items() if not has_state(model)],
            "bytes": bytes_to_save(stored, self.recipe.trained_roles, self._led_roles()),
        }

    def _load_roles(self, steps: int, rows: int) -> None:
        size = self.recipe.train.prompts_per_step
        spec = FinetuneSpec(total_train_steps=steps, dataset_size=rows, train_batch_size=size)
        self._backed = build_roles(
            self.recipe, self.topology, self.rank, self.device, self.meshes, spec, self.run_dir
        )
        self.models = {name: model for name, (model, _) in self._backed.items()}
        self._pausing = pausing_engines(self.recipe, self.topology, self.models)
        self._pools = connect_pools(self.recipe, self.topology, self.rank, self.run_dir)

    # -- data --------------------------------------------------------------------------------------

    def load_rows(self, dataset: str, rows: Sequence[Sequence[Any]]) -> Fields:
        """Load rows, given as (id, row, attempt); returns their description and the dataset's ids.
        If a stream ended before some of them, also returns which are missing and how many rows it
        has."""
        samples, described = self.datasets.load(dataset, rows, self.device)
        return {**self._store(samples), **described}

    def clear(self, ids: Sequence[str]) -> Fields:
        self.samples.forget(ids)
        return {}

    # -- calls -------------------------------------------------------------------------------------

    def run_call(
        self,
        call: str,
        ids: Sequence[str],
        metadata: Mapping[str, Sequence[Any]] | None = None,
        empty: Fields | None = None,
        parts: Sequence[Sequence[int]] | None = None,
        step: int = 0,
    ) -> Fields:
        """Run a call on this rank's samples and store its outputs.

        `metadata` is what the samples get for this call: their positions in the batch of a training
        step, their staleness in steps. A rank of the role without samples gets their description in
        `empty`, because it takes part in the collectives. `parts` are the batches of an evaluation,
        the same number on every rank. `step` seeds what a component may draw from global random
        streams.
        """
        mfc = self.calls[call]
        engine = self.models[mfc.model_name].module
        with self._performance.watching(call, step + 1, engine):
            answer = self._run(mfc, ids, metadata or {}, empty, parts or [], step)
        return {**answer, "rate": self._performance.rate(engine)}

    def _run(
        self,
        mfc: MFCDef,
        ids: Sequence[str],
        metadata: Mapping[str, Sequence[Any]],
        empty: Fields | None,
        parts: Sequence[Sequence[int]],
        step: int,
    ) -> Fields:
        is_pooled = mfc.model_name in self._pools
        if not is_pooled:
            seed_global_streams(self.recipe.seed, mfc.name, step, self.rank)
        data = self._inputs(mfc, ids, empty)
        data.metadata |= {name: list(values) for name, values in metadata.items()}
        with self._model_for(mfc.model_name) as model:
            self._copies.check(mfc.model_name)
            version = model.version.global_step
            answer = NO_OUTPUT | self._compute(mfc, model, data, parts, step)
            answer |= work_of(mfc, data, answer["batch"], model)
            if mfc.weight_copy is None:
                self._offload_after(mfc)
        if not is_pooled:
            wait_for_device(self.device)
        return {**answer, "version": version}

    def _model_for(self, role: str) -> AbstractContextManager[Model]:
        """The model that a call of a role works with."""
        pausing = self._pausing.get(role)
        return pausing.in_use() if pausing is not None else nullcontext(self.models[role])

    def _inputs(self, mfc: MFCDef, ids: Sequence[str], empty: Fields | None) -> SequenceSample:
        """What a call reads, under the interface's names."""
        if empty is None:
            data = self.samples.gather(ids, mfc.input_keys)
        else:
            data = _without_samples(empty, self.device)
        data.remap_keys_({old: new for old, new in mfc.input_key_remap.items() if old in data.keys})
        return data

    def _compute(
        self,
        mfc: MFCDef,
        model: Model,
        data: SequenceSample,
        parts: Sequence[Sequence[int]],
        step: int,
    ) -> Fields:
        """Returns the call's statistics, or a description of its outputs, which are stored."""
        origin = self._origin(mfc)
        run = partial(call_interface, self._interfaces.of(mfc), mfc.interface_type.value, model)
        if mfc.interface_type is ModelInterfaceType.TRAIN_STEP:
            return {"stats": read_stats(run(data, mfc.mb_spec), origin)}
        if mfc.interface_type is ModelInterfaceType.EVALUATE:
            batches = [data.select_indices(part) for part in parts]
            return {"stats": read_stats(run(batches), origin)}
        pool = self._pools.get(mfc.model_name)
        before = versions(data)
        returned = run(data, mfc.mb_spec) if pool is None else pool.run(mfc.name, step, data)
        warn_of_changes(mfc.name, data, before)
        answer = self._take_in(mfc, data, returned, origin)
        if mfc.interface_type is ModelInterfaceType.GENERATE:
            answer["scores"] |= measured_by(model.module)
        return answer

    def _take_in(self, mfc: MFCDef, data: SequenceSample, returned: Any, origin: Origin) -> Fields:
        """Store what a call returned for `data`; returns its description."""
        evaluates = mfc.name in self._interfaces.evaluating
        output, answer = accept_output(mfc, data, returned, origin, self.device, evaluates)
        self.samples.add(output)
        return answer

    def _origin(self, mfc: MFCDef) -> Origin:
        if mfc.name not in self._origins:
            interface = self._interfaces.of(mfc)
            has_model = self.models[mfc.model_name].module is not None
            section = self.recipe.models[mfc.model_name].backend
            backend = section.type if section is not None else None
            self._origins[mfc.name] = origin_of_call(
                mfc, backend, interface, has_model, self.datasets.name_of_sample
            )
        return self._origins[mfc.name]

    def copy_weights(self, after: str) -> Fields:
        """Take part in the copy after a call: on all ranks of the call's role and of the role that
        follows it. Returns the bytes that this rank sent."""
        mfc = self.calls[after]
        sent = self._copies.take_part(mfc, self.models, self._pausing)
        if mfc.model_name in self.models:
            self._offload_after(mfc)
        return {"bytes": sent}

    def _offload_after(self, mfc: MFCDef) -> None:
        if any(isinstance(hook, OffloadHook) for hook in mfc.post_hooks):
            with apart(f"offload of {mfc.model_name}", OFFLOAD):
                self.models[mfc.model_name].module.offload()

    # -- describing --------------------------------------------------------------------------------

    def describe(self, ids: Sequence[str]) -> Fields:
        """Describe samples for people to read, using the keys that this rank holds. They are
        decoded with the tokenizer that prompts were read with; another role may have one of its
        own."""
        return describe_samples(map(self.samples.sample, ids), self.datasets.tokenizer)

    # -- checkpoints -------------------------------------------------------------------------------

    def _held(self, roles: Sequence[str]) -> dict[str, Model]:
        return {name: self.models[name] for name in roles if name in self.models}

    def _led_roles(self) -> list[str]:
        """The roles of which this rank writes what is the same on all their ranks."""
        placement = self.topology.placement
        return [name for name in self.models if placement(name).ranks[0] == self.rank]

    def _own_calls(self) -> dict[str, MFCDef]:
        """The calls of this rank's roles."""
        return {name: mfc for name, mfc in self.calls.items() if mfc.model_name in self.models}

    def checkpoint(self, folder: str, step: int, samples: Mapping[str, Sequence[str]]) -> Fields:
        """Copy the state to host memory and start writing it, which ends with a report; returns
        what fits into a message. `samples` → keys: the part of the finished samples that this rank
        writes; they no longer change."""
        stored = self._held(stored_roles(self.recipe))
        copies = copy_roles(stored, self._led_roles())
        target = Path(folder)
        finished = [self.samples.sample(id_).select(keys) for id_, keys in samples.items()]

        def write() -> list[Path]:
            files = write_roles(copies, stored, target, self.rank)
            return files + write_samples(finished, target, self.rank)

        write_and_report(target, step, self.rank, write, self.report)
        states = {
            name: self._interfaces.of(mfc).state_dict() for name, mfc in self._own_calls().items()
        }
        trained = {name: vars(model.version) for name, model in self.models.items()}
        return {"versions": trained, "interfaces": states}

    def verify(self, folder: str, files: Sequence[Fields]) -> Fields:
        """Verify this rank's share of the files of a checkpoint,
        of which nothing has been loaded yet."""
        return verify_share(folder, files, torch.get_num_threads())

    def restore(
        self, folder: str, versions: Mapping[str, Any], interfaces: Mapping[str, Any]
    ) -> Fields:
        """Resume from a checkpoint written by any number of ranks."""
        changing = self._held(self.recipe.changing_roles)
        followed = followed_roles(self.recipe)
        leaders = {placement.role: placement.ranks[0] for placement in self.topology.placements}
        restore_roles(changing, Path(folder), followed, leaders, self.rank)
        self._copies.torn.clear()
        for name, model in self.models.items():
            model.version = ModelVersion(**versions[name]) if name in versions else model.version
        for name, mfc in self._own_calls().items():
            if interfaces.get(name):
                self._interfaces.of(mfc).load_state_dict(interfaces[name])
        return {}

    def load_samples(self, folder: str, ids: Sequence[str]) -> Fields:
        """Load finished samples from a checkpoint; returns their description."""
        return self._store([sample.to(self.device) for sample in read_samples(Path(folder), ids)])

    def _store(self, samples: Sequence[SequenceSample]) -> Fields:
        """Store samples of batch size 1; returns their description, None if there are none."""
        for sample in samples:
            self.samples.add(sample)
        if not samples:
            return {"batch": None}
        return {"batch": SequenceSample.gather([sample.meta() for sample in samples]).as_json()}

    # -- ending ------------------------------------------------------------------------------------

    def save(self, role: str, folder: str) -> Fields:
        """Save a role; every rank of the role takes part."""
        model = self.models[role]
        trainers = [mfc for mfc in self.calls.values() if mfc.model_name == role and mfc.is_train]
        with explain_disk_errors(Path(folder)):
            if trainers:
                self._interfaces.of(trainers[0]).save(model, folder)
            else:
                model.module.save_to_hf(model.tokenizer, folder)
        return {}

    def shutdown(self) -> Fields:
        for pool in self._pools.values():
            pool.close()
        for model, backend in self._backed.values():
            backend.destroy(model)
        self._backed.clear()
        self.models.clear()
        self._interfaces.clear()
        return {}

    def end_lane(self) -> Fields:
        """The last request to a pool's lane."""
        return {}


def _without_samples(described: Fields, device: torch.device) -> SequenceSample:
    """A batch of size 0 with the keys and dtypes of the others."""
    like = SequenceSample.from_json(described)
    shapes = {key: (0, *(like.trailing_shapes[key] or ())) for key in like.keys}
    data = {
        key: torch.empty(shape, dtype=like.dtypes[key], device=device)
        for key, shape in shapes.items()
    }
    return SequenceSample(
        ids=[], seqlens={key: [] for key in like.keys}, data={**data}, metadata=like.metadata
    )
