"""Virtual pipeline stages that Megatron cannot make. No torch here: recipes are validated with this
file."""

from __future__ import annotations

from collections.abc import Iterator

from rlcli.api.layout import LayoutProblem, RoleLayout

KEY = ("backend", "args", "virtual_stages")


def problems(layout: RoleLayout) -> Iterator[LayoutProblem]:
    """What `megatron` cannot do of a layout."""
    chunks, stages = layout.arguments.get(KEY[-1]) or 1, layout.mesh["pp"]
    if chunks == 1:
        return
    role = f"models.{layout.role}"
    if stages == 1:
        message = f"{role} has {chunks} virtual stages, but its pipeline has one stage"
        yield LayoutProblem(message, KEY, "1")
    elif layout.sizes is not None and len(layout.sizes.layers) % stages == 0:
        blocks = len(layout.sizes.layers) // stages
        if blocks % chunks:
            message = f"{chunks} virtual stages cannot divide the {blocks} blocks of a stage of"
            divisor = max(number for number in range(1, chunks) if blocks % number == 0)
            yield LayoutProblem(f"{message} {role}", KEY, str(divisor))
