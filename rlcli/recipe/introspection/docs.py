"""The docstrings under the fields of sections, read from source on demand: no run needs them."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from pydantic import BaseModel

from rlcli.recipe.schema_types import fields_of
from rlcli.recipe.sections.base import Section


def doc_of(model: type[BaseModel], field: str) -> str:
    """The docstring of a section's field, or of a component's argument, on one line."""
    if not issubclass(model, Section):
        return " ".join((fields_of(model)[field].description or "").split())
    written = model.documented_in or model
    ours = [
        cls
        for cls in written.__mro__
        if cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    ]
    return next(
        (doc for cls in ours if (doc := _docs_in(cls.__module__)[cls.__name__].get(field))), ""
    )


@cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """Class → field → the string literal that follows the field in the class body, on one line."""
    source = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: dict(_documented(node.body))
        for node in source.body
        if isinstance(node, ast.ClassDef)
    }


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, following in pairwise(body):
        match field, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                yield name, " ".join(doc.split())
