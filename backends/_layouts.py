"""Layouts that the engines over transformers models cannot run. No torch here: recipes are
validated with this file."""

from __future__ import annotations

from collections.abc import Iterator

from rlcli.api.architecture import Architecture
from rlcli.api.layout import LayoutProblem, RoleLayout

ROUTER_LOSSES = ("router_aux_loss_coef", "router_z_loss_coef")


def problems(layout: RoleLayout) -> Iterator[LayoutProblem]:
    """What `fsdp`, `inference` and `deepspeed` cannot do of a layout."""
    if layout.mesh["cp"] > 1 and layout.sizes is not None:
        yield from _of_context_parallelism(layout, layout.sizes)
    if layout.mesh["tp"] > 1 and layout.sizes is not None:
        yield from _of_tensor_parallelism(layout, layout.sizes)
    if "shard_size" in layout.arguments:
        yield from _of_sharding(layout)
    yield from _of_flash_attention(layout)


def whole_sequences(layout: RoleLayout) -> str | None:
    """Why engines compute every sequence as a whole; None: common prefixes once."""
    if not layout.arguments.get("share_prefixes", True):
        return "share_prefixes is false"
    if layout.mesh["cp"] > 1:
        return "cp divides each sequence among ranks"
    if any(layout.arguments.get(name) is not None for name in ROUTER_LOSSES):
        return "router losses count the tokens of every sequence"
    return None


def _of_context_parallelism(layout: RoleLayout, sizes: Architecture) -> Iterator[LayoutProblem]:
    ranks, heads = layout.mesh["cp"], sizes.heads // layout.mesh["tp"]
    if layout.arguments.get("context_parallel") == "ulysses" and heads % ranks:
        message = f"ulysses cannot divide the {heads} attention heads of models.{layout.role} among"
        key = ("backend", "args", "context_parallel")
        yield LayoutProblem(f"{message} {ranks} context-parallel ranks", key, "ring")


def _of_tensor_parallelism(layout: RoleLayout, sizes: Architecture) -> Iterator[LayoutProblem]:
    """transformers says for each family how its matrices are divided: not for gpt2, and for experts
    in ways that the engine does not know."""
    if sizes.experts or sizes.position_rows:
        message = f"the {sizes.model_type} of models.{layout.role} cannot be tensor-parallel"
        reason = (
            "only ep divides experts"
            if sizes.experts
            else "transformers has no tensor-parallel plan for it"
        )
        yield LayoutProblem(f"{message}: {reason}", ("mesh", "tp"))


def _of_sharding(layout: RoleLayout) -> Iterator[LayoutProblem]:
    """A number of shards that does not divide the ranks; a vocabulary that cannot be sharded."""
    ranks, role = layout.mesh["dp"] * layout.mesh["cp"], f"models.{layout.role}"
    shards = min(layout.arguments["shard_size"] or ranks, ranks)
    if ranks % shards:
        message = f"shard_size {shards} does not divide the {ranks} data- and context-parallel"
        smaller = [size for size in range(2, shards) if ranks % size == 0]
        value = str(smaller[-1]) if smaller else "null"
        yield LayoutProblem(f"{message} ranks of {role}", ("backend", "args", "shard_size"), value)
    elif layout.sizes is not None:
        yield from _of_vocabulary(layout.sizes, layout.mesh["tp"], shards, role)


def _of_vocabulary(
    sizes: Architecture, parts: int, shards: int, role: str
) -> Iterator[LayoutProblem]:
    """Rows of which torch would not know who has which, where columns cannot be divided either."""
    rows = sizes.vocabulary
    if sizes.hidden % shards and not rows_are_known(rows, parts, shards):
        message = f"the {rows} rows of the vocabulary of {role} cannot be sharded over {parts}"
        yield LayoutProblem(f"{message} tensor-parallel and {shards} other ranks", ("mesh", "tp"))


def rows_are_known(rows: int, parts: int, ranks: int) -> bool:
    """Whether torch knows which rows a rank has if `parts` tensor-parallel ranks divide them and
    `ranks` others divide each part: it takes those with the same place in all parts to be divided
    as if they alone were (`_StridedShard`)."""
    divided = [_chunks(part, ranks) for part in _chunks(rows, parts)]
    return all([*sizes] == _chunks(sum(sizes), parts) for sizes in zip(*divided, strict=True))


def _chunks(rows: int, parts: int) -> list[int]:
    """The sizes of the parts as torch makes them."""
    each = -(-rows // parts)
    return [max(0, min(each, rows - index * each)) for index in range(parts)]


def _of_flash_attention(layout: RoleLayout) -> Iterator[LayoutProblem]:
    if layout.arguments.get("attention") != "flash":
        return
    key, role = ("backend", "args", "attention"), f"models.{layout.role}"
    if layout.device == "cpu":
        message = f"{role} has `attention: flash`, which computes on GPUs only"
        yield LayoutProblem(message, key, "auto")
    elif layout.mesh["cp"] > 1 and layout.arguments.get("context_parallel") != "ulysses":
        message = (
            f"{role} has `attention: flash` and cp: the run may choose a ring, which uses torch's"
        )
        key = ("backend", "args", "context_parallel")
        yield LayoutProblem(f"{message} kernels", key, "ulysses")
