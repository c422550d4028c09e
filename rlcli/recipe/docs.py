"""The doc strings under the fields of a class, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap


def attribute_docs(cls: type) -> dict[str, str]:
    """Field name → the string literal that follows the field in the class body, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(definition.body, definition.body[1:], strict=False):
        if (
            (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr))
            and isinstance(doc.value, ast.Constant)
            and isinstance(doc.value.value, str)
        ):
            docs[field.target.id] = " ".join(doc.value.value.split())
    return docs
