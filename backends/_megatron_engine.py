"""An engine over Megatron-Core: all micro-batches of a step go to Megatron's own pipeline
schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlcli.api.data import SequenceSample
from rlcli.api.family import HFFamily, ModelConfig
from rlcli.api.key_meaning import SEQUENCES
from rlcli.api.loss_stats import Stats, read_loss
from rlcli.api.micro_batches import MicroBatch, idle_micro_batch
from rlcli.api.model import EngineState, GivesParameters, LossFn, Model, ModelSource, TrainEngine
from rlcli.api.operations import OperationCount
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import ModelError
from rlcli.ops.attention import packed_attention
from rlcli.ops.context_choice import Choice
from rlcli.ops.packing import positions

from ._collectives import all_reduced, from_last_rank
from ._megatron_experts import StageRouters, stage_routers
from ._megatron_groups import RoleGroups, role_groups
from ._megatron_layout import Place, StageLayout, mark_shared
from ._megatron_messages import StageMessages
from ._megatron_model import (
    PackedSequences,
    StageModel,
    StageOutput,
    check_model,
    transformer_config,
)
from ._megatron_offload import Offloading
from ._megatron_optimizer import ShardedAdamW, data_parallel, reduce_gradients
from ._megatron_state import StageState
from ._megatron_weights import StageWeights
from ._process_group import process_group
from ._routers import RoutedStep
from ._routing_replay import RoutedLayers, routes_of
from ._saving import SavingRanks, describe, save_model
from ._transformers import Pack, compute_dtype, products_of

if TYPE_CHECKING:
    from ._transformers import Packing
    from .megatron import Megatron

T = TypeVar("T")


class MegatronEngine(TrainEngine):
    """A rank's part of a model: one tensor-parallel part of one pipeline stage."""

    operations: OperationCount

    def __init__(self, model: Model, settings: Megatron):
        self.role = model.name
        self.settings = settings
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 1
        self._device = model.device
        self._dtype = compute_dtype(settings.dtype, model.device)
        source = model.required_source
        self._save_dtype = model.save_dtype or source.dtype
        self.lm: Any = source.skeleton()  # for its names and description; it has no weights
        family = _family(model, source)
        with process_group():
            self.groups = role_groups(model.device_mesh, model.expert_ranks)
            self._build(model, source, family)

    def _build(self, model: Model, source: ModelSource, family: HFFamily) -> None:
        settings = self.settings
        config = replace(
            family.config_from_hf(source.config.to_dict()), value_head=source.head == "value"
        )
        position = _place(self.groups, settings.virtual_stages)
        check_model(model.name, config, position)
        self.operations = _operation_count(self.lm, self._dtype, self.groups)
        self._pack = self._pack_for(settings.context_parallel)
        shapes = {name: parameter.shape for name, parameter in self.lm.named_parameters()}
        self.layout = StageLayout(config, family, shapes, position)
        self._config = transformer_config(config, position, self._dtype, settings)
        self.routers = stage_routers(self.role, config, settings)
        self.chunks = self._chunks_of(config, position)
        self.parameters = self.layout.parameters_of(self.chunks)
        mark_shared(self.parameters)
        self._load(source)
        self._freeze()
        self._prepare_training()

    def _chunks_of(self, config: ModelConfig, position: Place) -> list[StageModel]:
        """The chunks of this stage, without weights."""
        rope = self.lm.base_model.rotary_emb.inv_freq.to(self._device, torch.float32)
        chunks = [
            StageModel(config, self._config, rope, self.groups, position, chunk, self.routers)
            for chunk in range(position.chunks)
        ]
        for chunk in chunks:
            chunk.to(self._device, self._dtype)  # norms start as float32 on the host
        return chunks

    def _prepare_training(self) -> None:
        groups = self.groups
        self.wrapped = [data_parallel(chunk, groups) for chunk in self.chunks]
        for wrapped in self.wrapped:
            wrapped.train()  # dropout is off; without this, activations would not be recomputed
        self.optimizer = ShardedAdamW(self.wrapped, self.settings, groups)
        self._config.finalize_model_grads_func = reduce_gradients
        self._state = StageState(self.parameters, self.layout, self.optimizer, groups)
        self._weights = StageWeights(self.parameters, self.layout, self.optimizer, groups)
        self._offloading = Offloading(self.chunks, self.optimizer)

    def _pack_for(self, choice: Choice) -> Pack:
        """How this rank takes its share of a pack of sequences. Raises ModelError."""
        if self.groups.cp.size() == 1:
            return packed_attention
        from ._context_parallel import pack_over_ranks

        return pack_over_ranks(self.lm, self.groups.cp, choice, self.groups.tp.size(), self.role)

    def _load(self, source: ModelSource) -> None:
        """Fill this rank's parameters, one at a time."""
        with torch.no_grad():
            for share, parameter in self.parameters:
                parts = self.layout.parts(share)
                read = [source.read(part.name, part.region).to(self._device) for part in parts]
                self.layout.join(share, read, parameter)

    def _freeze(self) -> None:
        """Freeze the parameters that are not trained in transformers' model. Raises ModelError for
        one that is fused from both trained and frozen ones."""
        trained = {name: parameter.requires_grad for name, parameter in self.lm.named_parameters()}
        for share, parameter in self.parameters:
            names = [part.name for part in self.layout.parts(share)]
            frozen = [name for name in names if not trained[name]]
            if 0 < len(frozen) < len(names):
                others = ", ".join(name for name in names if trained[name])
                raise ModelError(
                    f"Megatron fuses {frozen[0]} of role {self.role}, which is "
                    f"frozen, with {others}"
                )
            parameter.requires_grad_(not frozen)

    # -- ranks -------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dp_size(self) -> int:
        return self.groups.dp.size()

    @property
    def is_last_stage(self) -> bool:
        return self.groups.is_last_stage

    def all_reduce(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return all_reduced(value, op, self.groups.dp)

    def from_last_stage(self, value: torch.Tensor) -> torch.Tensor:
        if self.groups.pp.size() == 1:
            return value
        return from_last_rank(value.to(self._device), self.groups.pp)

    # -- batches -----------------------------------------------------------------------------------

    def forward_batch(
        self, micro_batches: Sequence[MicroBatch], hook: Callable[[StageOutput, SequenceSample], T]
    ) -> list[T]:
        def results(output: StageOutput, micro_batch: MicroBatch) -> list[T]:
            return [] if micro_batch.is_idle else [hook(output, micro_batch.sample)]

        with torch.no_grad():
            return [
                output
                for outputs in self._run(micro_batches, results, forward_only=True)
                for output in outputs
            ]

    def optimizer_zero_grad(self) -> None:
        self._offloading.gradients.bring_back()
        self.optimizer.zero_grad()

    def forward_backward_batch(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, divisor: torch.Tensor
    ) -> list[Stats]:
        uncounted = torch.zeros((), dtype=torch.int)  # tokens that Megatron would divide by

        def loss(
            output: StageOutput, micro_batch: MicroBatch
        ) -> tuple[torch.Tensor, torch.Tensor, Stats]:
            if micro_batch.is_idle:
                return output.zero, uncounted, {}
            summed, stats = read_loss(loss_fn(output, micro_batch.sample))
            return summed / divisor.to(summed), uncounted, stats

        if self.routers is None or not self.routers.is_measured:
            return self._run(micro_batches, loss, forward_only=False)
        return self._routed(micro_batches, loss, self.routers)

    def _routed(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[[StageOutput, MicroBatch], Any],
        routers: StageRouters,
    ) -> list[Stats]:
        """The stats of a step with losses of routers. The load of the experts, which they need, is
        counted first, in forward passes of their own."""
        working = [micro_batch for micro_batch in micro_batches if not micro_batch.is_idle]
        lengths = [sum(micro_batch.sample.flat_seqlens(SEQUENCES)) for micro_batch in working]
        tokens = torch.tensor(sum(lengths), dtype=torch.float64, device=self._device)
        step = RoutedStep(routers, self.all_reduce(tokens))
        if routers.aux_coef:
            with torch.no_grad(), routers.counting(self._device):
                self._run(micro_batches, lambda *_: None, forward_only=True)
            step.load = routers.load(self.groups)
        with routers.training(step, self._device):
            stats = self._run(micro_batches, loss, forward_only=False)
        measured = step.stats(routers.sums(self.groups))
        return [*stats, measured] if working and self.is_last_stage else stats

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        then: Callable[[StageOutput, MicroBatch], Any],
        forward_only: bool,
    ) -> list[Any]:
        """What `then` returns for each micro-batch on the last stage; nothing on other stages."""
        if not micro_batches:
            return []
        self._offloading.weights.bring_back()
        micro_batches = self._enough(micro_batches)
        stages, chunks = self.groups.pp.size(), len(self.chunks)
        schedule = get_forward_backward_func(stages, chunks if chunks > 1 else None)
        batches = [iter(micro_batches) for _ in self.chunks]
        messages = StageMessages(self.groups.pp, self._config) if stages > 1 else None
        with process_group():
            return schedule(
                forward_step_func=partial(self._forward, then),
                data_iterator=batches if chunks > 1 else batches[0],
                model=self.wrapped,
                num_microbatches=len(micro_batches),
                seq_length=1,  # stages send each other the shapes of their tensors
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                p2p_communicator=messages,
                pg_collection=self.groups.collection(),
            )

    def _forward(
        self,
        then: Callable[[StageOutput, MicroBatch], Any],
        batches: Iterator[MicroBatch],
        model: Any,
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """The next micro-batch through a chunk of this stage: its hidden states, and what the
        schedule calls with those of the last stage."""
        micro_batch = next(batches)
        tokens, lengths = self._tokens(micro_batch.sample)
        packing = self._pack(lengths, self._device)
        routes = self._routes(micro_batch, packing)
        if model is self.wrapped[0]:  # chunks of a stage compute with the same tokens
            self.operations.add(
                len(packing.is_padding), packing.pairs, trains=torch.is_grad_enabled()
            )
        with self.routers.forward_pass() if self.routers else nullcontext():
            hidden = model(
                packing.mine(tokens)[None],
                packing.mine(positions(lengths, self._device))[None],
                None,
                packed_seq_params=PackedSequences(packing, routes),
            )

        def finish(hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
            output = StageOutput(self.chunks[-1], hidden[:, 0], tokens, packing, self.operations)
            return then(output, micro_batch)

        return hidden, finish

    def _enough(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """As many as Megatron's schedule needs, the last ones idle. Virtual stages take turns with
        as many micro-batches as there are stages; with fewer than two turns, stages that are still
        filling the pipeline would wait for those that already empty it."""
        stages = self.groups.pp.size()
        turns = max(2, -(-len(micro_batches) // stages)) if len(self.chunks) > 1 else 0
        missing = range(len(micro_batches), turns * stages)
        return [*micro_batches, *(idle_micro_batch(self._device) for _ in missing)]

    def _routes(self, micro_batch: MicroBatch, packing: Packing) -> torch.Tensor | None:
        """The experts prescribed to the routers for the tokens of a micro-batch. Raises ModelError
        for experts that the model does not have."""
        routes = routes_of(micro_batch.sample)
        if routes is not None:
            self._routed_layers.check(routes, self.role)
            routes = packing.mine(routes.to(self._device))
        if self.routers is None:
            return None
        return self.routers.routes(routes, packing.is_padding | micro_batch.is_idle)

    @cached_property
    def _routed_layers(self) -> RoutedLayers:
        """Raises ModelError for a model without routers."""
        return RoutedLayers.of(self.lm, self.role)

    def _tokens(self, sample: SequenceSample) -> tuple[torch.Tensor, tuple[int, ...]]:
        assert sample.data is not None
        tokens = sample.data[SEQUENCES]
        assert tokens is not None
        return tokens.to(self._device), tuple(sample.flat_seqlens(SEQUENCES))

    def lr_scheduler_step(self, version_steps: int) -> float:
        rate = self.settings.rate(version_steps, self.total_steps)
        self.optimizer.set_rate(rate)
        return rate

    def optimizer_step(self) -> float:
        self._offloading.optimizer_state.bring_back()
        with process_group():
            return self.optimizer.step()

    # -- weights -----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Weights are restored by the next pass, the gradient buffer and the optimizer's state by
        the next step."""
        self._offloading.put_away()

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathered from the ranks that share a copy of the model."""
        self._offloading.bring_back()
        for name, parameter in self.lm.named_parameters():
            yield name, self._weights.gathered(name, parameter.shape, self._device)

    def weight_blocks(self) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
        self._offloading.bring_back()
        return self._weights.blocks()

    def take_parameters(self, source: GivesParameters, eta: float) -> None:
        self._offloading.bring_back()
        self._weights.mix_in(source, eta)

    # -- saving ------------------------------------------------------------------------------------

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        with self._offloading.brought_back():
            return self._state.give(room_for_optimizer)

    def state_was_filled(self, state: EngineState) -> None:
        with self._offloading.brought_back():
            self._state.take(state)

    def save_description(self, tokenizer: Any, folder: str) -> None:
        describe(self.lm, torch.float32, tokenizer, folder)

    def save_to_hf(self, tokenizer: Any, save_dir: str) -> None:
        groups = [self.groups.all] if self.groups.all.size() > 1 else []
        ranks = SavingRanks(self.groups.leads, groups, self._device)
        save_model(
            self.lm, self.whole_parameters(), tokenizer, Path(save_dir), self._save_dtype, ranks
        )


def _family(model: Model, source: ModelSource) -> HFFamily:
    """Raises ModelError for an unknown family."""
    if model.family is None:
        hf = source.config.to_dict()
        raise ModelError(
            f"the megatron backend cannot run the model of role {model.name}: its family "
            f"{hf.get('model_type')} is not implemented",
            hint=f"set models.{model.name}.backend.type=fsdp",
        )
    return model.family


def _place(groups: RoleGroups, chunks: int) -> Place:
    tp, pp, ep = groups.tp, groups.pp, groups.ep
    return Place(tp.rank(), tp.size(), pp.rank(), pp.size(), ep.rank(), ep.size(), chunks)


def _operation_count(lm: Any, dtype: torch.dtype, groups: RoleGroups) -> OperationCount:
    """Counts what a rank computes; of the stages, the last one alone computes with the head."""
    stages = groups.pp.size()
    products = products_of(lm)
    products = replace(products, of_score=products.of_score * stages)
    name = str(dtype).removeprefix("torch.")
    return OperationCount(products, name, groups.tp.size() * stages, groups.cp.size())
