"""The common part of all engines over transformers models: forward passes, generation,
reductions, saving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rlcli.api.block_parts import BlockPart
from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.engine_loop import ForwardLoop
from rlcli.api.generation import check_positions, prompts_with_room
from rlcli.api.key_meaning import ROUTED_EXPERTS, SEQUENCES
from rlcli.api.layout import RoleLayout
from rlcli.api.model import (
    EngineState,
    GeneratedResponses,
    GenerationEngine,
    GivesParameters,
    Model,
    ModelOutput,
    ResponseStream,
)
from rlcli.api.model_export import own_weights
from rlcli.api.model_source import ModelSource, fill, materialize
from rlcli.api.operations import OperationCount, Products
from rlcli.api.token_texts import id_count
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import ModelError
from rlcli.ops.attention import packed_attention
from rlcli.ops.packed_product import can_pack

from ._collectives import all_reduced
from ._generation import BatchDecoder, Sampler
from ._generation_copy import GenerationCopy
from ._generation_stream import DecodingStream
from ._layouts import whole_sequences
from ._memory import packing_pays
from ._packable import check_rotary
from ._parameter_parts import gathered, gathered_beyond, held_blocks
from ._prefix_sharing import PrefixSharing
from ._saving import SavingRanks, describe, save_model
from ._settings import ContextParallelism, TransformersSettings
from ._tensor_parallel import parallelize
from ._transformers import Pack, PackedModel, compute_dtype, flash_attention_of, products_of

if TYPE_CHECKING:
    from ._routing_replay import RouterChoices
    from ._transformers import Packing

T = TypeVar("T")
HeldBlock = tuple[WeightBlock, torch.Tensor]
"""A block of a parameter, and the values of this rank."""


class TransformersEngine(ForwardLoop, GenerationEngine):
    """Forward passes and generation; `inference` uses it as it is, `fsdp` adds training."""

    def __init__(self, model: Model, settings: TransformersSettings):
        source = model.required_source
        self.role = model.name
        self.save_dtype = model.save_dtype or source.dtype
        self._mesh = model.device_mesh
        self._device = model.device
        self._dp_group = self._mesh["dp"].get_group() if dimension(self._mesh, "dp") else None
        self._kv_cache_tokens = settings.kv_cache_tokens
        self._weights_number = 0
        self._choices: dict[nn.Module, RouterChoices] = {}
        """The recorded or prescribed choices of a model's routers, for models that were asked for
        them."""
        self.lm: Any = self._skeleton(source)
        self.vocabulary = _vocabulary(model, self.lm)
        dtype = compute_dtype(settings.dtype, model.device)
        self._prepare_passes(settings, dtype)
        self._copy = self._generation_copy(source, dtype)
        self._lay_out(model)
        materialize(self.packed, model.device)
        fill(self.lm, source)

    def _prepare_passes(self, settings: TransformersSettings, dtype: torch.dtype) -> None:
        """Decide how passes over packs of sequences are computed, and count what they compute."""
        self._flash = flash_attention_of(
            self.lm, settings.attention, self._device, dtype, self.role
        )
        self._whole_packs = partial(packed_attention, flash=self._flash)
        products = products_of(self.lm)
        self._sharing = self._prefix_sharing(settings, products)
        share = self._sharing.layout if self._sharing is not None else None
        name = str(dtype).removeprefix("torch.")
        self.operations = OperationCount(products, name, self._ranks("tp"), self._ranks("cp"))
        self.packed = PackedModel(self.lm, dtype, self._pack(settings), share, self.operations)

    def _ranks(self, name: str) -> int:
        """The size of a dimension of the role's mesh."""
        ranks = dimension(self._mesh, name)
        return ranks.size() if ranks is not None else 1

    @property
    def is_sharded(self) -> bool:
        """Whether data-parallel ranks hold parts of parameters."""
        return False

    def _skeleton(self, source: ModelSource) -> nn.Module:
        """The model (or this tensor-parallel rank's part of it)
        without memory for its parameters."""
        lm = source.skeleton()
        if (tensor_parallel := dimension(self._mesh, "tp")) is not None:
            parallelize(lm, tensor_parallel, self.role)
        return lm

    def _generation_copy(self, source: ModelSource, dtype: torch.dtype) -> GenerationCopy | None:
        """None if calls generate with the model itself."""
        # tensor-parallel ranks compute with parts of matrices, which are not packed
        may_pack = dimension(self._mesh, "tp") is None and can_pack(self._device, dtype)
        if may_pack or self.is_sharded or dtype is not torch.float32:
            return GenerationCopy(self._skeleton(source), dtype, may_pack)
        return None

    def _pack(self, settings: TransformersSettings) -> Pack:
        """How this rank takes its share of a pack of sequences."""
        if self._context_group is None:
            return self._whole_packs
        from ._context_parallel import pack_over_ranks

        assert isinstance(settings, ContextParallelism)
        return pack_over_ranks(
            self.lm,
            self._context_group,
            settings.context_parallel,
            self._ranks("tp"),
            self.role,
            self._flash,
        )

    def _prefix_sharing(
        self, settings: TransformersSettings, products: Products
    ) -> PrefixSharing | None:
        """None if each sequence is computed as a whole."""
        mesh = {"cp": self._ranks("cp")}
        layout = RoleLayout(self.role, mesh, vars(settings), self._device.type)
        if whole_sequences(layout) is not None:
            return None
        return PrefixSharing.of(products, self._device, self._flash)

    def tokens_of(self, sample: SequenceSample) -> int:
        if self._sharing is None or ROUTED_EXPERTS in sample.keys:
            return super().tokens_of(sample)
        return self._sharing.counted(sample.data[SEQUENCES], tuple(sample.flat_seqlens(SEQUENCES)))

    @property
    def _context_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the tokens of a micro-batch; None if there is only this one."""
        context_parallel = dimension(self._mesh, "cp")
        return context_parallel.get_group() if context_parallel is not None else None

    def _lay_out(self, model: Model) -> None:
        """Change the model before memory is allocated for its parameters, for example shard it."""

    # -- primitives --------------------------------------------------------------------------------

    def forward_micro_batch(
        self, micro_batch: SequenceSample, then: Callable[[ModelOutput], T]
    ) -> T:
        self._onload()
        tokens = micro_batch.data["packed_input_ids"].to(self._device)
        lengths = tuple(micro_batch.flat_seqlens("packed_input_ids"))
        check_rotary(self.role, max(lengths), self.lm.config)
        routes = self._routes_of(micro_batch)
        with self._in_pass():
            before = partial(self._route, routes)
            return self._compute(tokens, lengths, then, before, routes is None)

    def _compute(self, *inputs: Any) -> Any:
        """A forward pass of the packed model."""
        return self.packed(*inputs)

    def _routes_of(self, micro_batch: SequenceSample) -> torch.Tensor | None:
        """[T, L, k] the experts that are prescribed for its tokens, if any are."""
        if ROUTED_EXPERTS not in micro_batch.keys:
            return None
        from ._routing_replay import routes_of

        self._choices_of(self.lm)
        routes = routes_of(micro_batch)
        return None if routes is None else routes.to(self._device)

    def _route(self, routes: torch.Tensor | None, packing: Packing) -> None:
        """Prescribe the experts [T, L, k] of a pack of tokens; None: routers choose."""
        if (choices := self._choices.get(self.lm)) is not None:
            choices.prescribe(None if routes is None else packing.mine(routes))

    def _choices_of(self, lm: nn.Module) -> RouterChoices:
        """Raises ModelError for a model without routers."""
        if lm not in self._choices:
            from ._routing_replay import RouterChoices

            self._choices[lm] = RouterChoices(lm, self.role)
        return self._choices[lm]

    def _in_pass(self) -> AbstractContextManager[None]:
        """A context that is entered for the duration of a forward pass."""
        return nullcontext()

    # -- ranks -------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dp_size(self) -> int:
        return dist.get_world_size(self._dp_group) if self._dp_group is not None else 1

    def all_reduce(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return all_reduced(value, op, self._dp_group)

    # -- generation --------------------------------------------------------------------------------

    def generate(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> GeneratedResponses:
        prompts = prompts_with_room(input_, gconfig, self._check_length)
        with self.generator(self._packs(len(seeds), gconfig)) as lm:
            run = self._decoder(lm, tokenizer, gconfig).run
            group = self._context_group
            if group is None:
                return run(prompts, seeds)
            from ._context_parallel import generate_over_ranks

            no_routes = self._choices_of(lm).no_tokens if gconfig.routing_replay else None
            return generate_over_ranks(run, prompts, seeds, group, self._device, no_routes)

    def stream(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, int]]:
        prompts = prompts_with_room(input_, gconfig, self._check_length)
        with self.generator(self._packs(len(seeds), gconfig)) as lm:
            yield from self._decoder(lm, tokenizer, gconfig).stream(prompts, seeds)

    @property
    def weights_number(self) -> int:
        return self._weights_number

    def open(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, longest_prompt: int
    ) -> ResponseStream:
        self._check_length(longest_prompt + gconfig.max_new_tokens)
        packs = self._packs(gconfig.max_concurrent_responses, gconfig)
        return DecodingStream(
            partial(self.generator, packs),
            lambda lm: self._decoder(lm, tokenizer, gconfig),
            lambda: self._weights_number,
            self._check_length,
            longest_prompt,
        )

    def _packs(self, responses: int, gconfig: GenerationHyperparameters) -> bool:
        width = self.packed.compute_dtype.itemsize
        return packing_pays(responses, gconfig.max_new_tokens, width)

    def _decoder(
        self, lm: nn.Module, tokenizer: Any, gconfig: GenerationHyperparameters
    ) -> BatchDecoder:
        ends = torch.tensor(
            sorted({tokenizer.eos_token_id, *gconfig.stop_token_ids}), device=self._device
        )
        sampler = Sampler(gconfig, ends, self.vocabulary)
        choices = self._choices_of(lm) if gconfig.routing_replay else None
        return BatchDecoder(
            lm,
            self.packed.compute_dtype,
            gconfig,
            sampler,
            self._kv_cache_tokens,
            choices,
            self._whole_packs,
        )

    def _check_length(self, longest: int) -> None:
        """Check the length of a prompt and its response. Raises ModelError."""
        check_positions(self.role, longest, self.lm.config)
        check_rotary(self.role, longest, self.lm.config)
        if self._kv_cache_tokens is not None and longest > self._kv_cache_tokens:
            raise ModelError(
                (
                    f"prompt and response of role {self.role} may reach {longest} tokens; its KV "
                    f"cache has room for {self._kv_cache_tokens}"
                ),
                hint=(
                    f"raise models.{self.role}.backend.args.kv_cache_tokens, or lower "
                    "generation.max_new_tokens"
                ),
            )

    @contextmanager
    def generator(self, packs: bool = False) -> Iterator[nn.Module]:
        """The model that a call generates with. Parameters that are sharded, or of another dtype,
        are gathered and cast once, here, and packed if `packs` and they can be."""
        self._onload()
        if self._copy is None:
            if self.lm in self._choices:
                self._choices[self.lm].prescribe(None)
            yield self.lm
            return
        with self._copy.of(self._gathered_parameters(), self.lm.named_buffers(), packs) as lm:
            yield lm

    def _gathered_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters gathered over data-parallel ranks; tensor-parallel ranks keep their parts."""
        tensor_parallel = dimension(self._mesh, "tp")
        for name, parameter in self.lm.named_parameters():
            yield name, gathered_beyond(parameter.detach(), tensor_parallel)

    # -- weights -----------------------------------------------------------------------------------

    def take_parameters(self, source: GivesParameters, eta: float) -> None:
        self._weights_number += 1
        mine = {
            name: list(held_blocks(name, parameter))
            for name, parameter in self._held_parameters().items()
        }
        with torch.no_grad():
            for block, theirs in source.parameter_blocks():
                self._mix_in(block, theirs, mine.get(block.name), eta)

    def _mix_in(
        self, block: WeightBlock, theirs: torch.Tensor, mine: list[HeldBlock] | None, eta: float
    ) -> None:
        """Move what is held of a block towards another role's values. Raises ModelError if there is
        no such parameter."""
        if mine is None or any(my_block.shape != block.shape for my_block, _ in mine):
            raise ModelError(
                f"role {self.role} cannot follow {block.name}: it has no such parameter"
            )
        for my_block, my_values in mine:
            common = my_block.common(block)
            if common is not None:
                shared = my_values[common.within(my_block)]
                shared.lerp_(theirs[common.within(block)].to(shared), eta)

    def weight_blocks(self) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
        blocks = (
            pair
            for name, parameter in self._held_parameters().items()
            for pair in held_blocks(name, parameter)
        )
        return {block: partial(_as_it_is, tensor) for block, tensor in blocks}

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._held_parameters().items():
            yield name, gathered(parameter)

    def _held_parameters(self) -> dict[str, Any]:
        """Name → live parameter: whole, or this rank's part of it."""
        return {name: parameter.detach() for name, parameter in self.lm.named_parameters()}

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def _onload(self) -> None:
        if next(self.lm.parameters()).device.type != self._device.type:
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        self.packed.to(device)

    # -- saving ------------------------------------------------------------------------------------

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        return EngineState(self.named_weights())

    def named_weights(self) -> Mapping[str, torch.Tensor | BlockPart]:
        """Parameters (each once) and the buffers that are stored in the model's files."""
        return own_weights(self.lm)

    def save_description(self, tokenizer: Any, folder: str) -> None:
        describe(self.lm, next(self.lm.parameters()).dtype, tokenizer, folder)

    def _outline(self) -> Any:
        """The model with the whole shape of every parameter, whichever part a rank holds."""
        return self.lm

    def save_to_hf(self, tokenizer: Any, save_dir: str) -> None:
        leads = self._mesh is None or not any(self._mesh.get_coordinate())
        groups = self._mesh.get_all_groups() if self._mesh is not None else ()
        ranks = SavingRanks(leads, groups, self._device)
        save_model(
            self._outline(),
            self.whole_parameters(),
            tokenizer,
            Path(save_dir),
            self.save_dtype,
            ranks,
        )


def dimension(mesh: Any, name: str) -> Any:
    """A dimension of a role's mesh, or None if it has only one rank."""
    if mesh is None or name not in mesh.mesh_dim_names or mesh[name].size() == 1:
        return None
    return mesh[name]


def _vocabulary(model: Model, lm: Any) -> int:
    """The ids that a model may sample are below this."""
    return id_count(model.tokenizer) if model.tokenizer is not None else int(lm.config.vocab_size)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
