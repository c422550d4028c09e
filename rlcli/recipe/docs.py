"""The doc strings under the fields of sections, read from their source when somebody asks: no run needs them."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from pydantic import BaseModel

from rlcli.recipe.section import Section


def doc_of(model: type[BaseModel], field: str) -> str:
    """The text under a field of a section, or of a component's arguments, on one line."""
    if not issubclass(model, Section):
        return " ".join((model.model_fields[field].description or "").split())
    written = model.documented_in or model
    return _docs_in(written.__module__)[written.__name__].get(field, "")


@cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """Class → field → the string literal that follows the field in the class body, on one line."""
    source = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_documented(node.body)) for node in source.body if isinstance(node, ast.ClassDef)}


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, following in pairwise(body):
        match field, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                yield name, " ".join(doc.split())
