"""Whether test code executes anything when it is run: definitions alone pass with every program."""

from __future__ import annotations

import ast
import builtins
import warnings

_DOES_NOTHING = (ast.Import, ast.ImportFrom, ast.Pass, ast.Global, ast.Delete)
_CONSTANT = (
    ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred,
    ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator, ast.expr_context, ast.Lambda,
)  # fmt: skip
"""What an expression consists of that calls and compares nothing; a lambda is a definition."""
_MAIN_GUARD = {
    ast.dump(ast.parse(text, mode="eval").body)
    for text in ("__name__ == '__main__'", "'__main__' == __name__")
}


def executes(code: str, has_entry_point: bool) -> bool:
    """Whether a statement of this code is executed that is more than an import, a definition or
    the assignment of a constant. With an entry point, a function `check` is called.

    Code that cannot be parsed counts as executed: it fails with every program.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    if has_entry_point and any(map(_defines_check, ast.walk(tree))):
        return True
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return _any_executes(tree.body, imported)


def _defines_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "check" and isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.FunctionDef) and node.name == "check"


def _any_executes(statements: list[ast.stmt], imported: set[str]) -> bool:
    return any(_executes(statement, imported) for statement in statements)


def _executes(statement: ast.stmt, imported: set[str]) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _is_handed_over(statement.decorator_list, imported)
        case ast.ClassDef():
            return _is_handed_over(statement.decorator_list, imported) or _any_executes(
                statement.body, imported
            )
        case ast.If() if ast.dump(statement.test) in _MAIN_GUARD:
            return _any_executes(statement.orelse, imported)
        case ast.If():
            return _computes(statement.test) or _any_executes(
                statement.body + statement.orelse, imported
            )
        case ast.Try():
            handlers = [step for handler in statement.handlers for step in handler.body]
            steps = statement.body + handlers + statement.orelse + statement.finalbody
            return _any_executes(steps, imported)
        case ast.Assign() | ast.AnnAssign() | ast.Expr():
            return statement.value is not None and _computes(statement.value)
    return not isinstance(statement, _DOES_NOTHING)


def _is_handed_over(decorators: list[ast.expr], imported: set[str]) -> bool:
    """Whether a decorator that is the test's own or the program's gets the definition; it may call
    it."""
    functions = [node.func if isinstance(node, ast.Call) else node for node in decorators]
    names = {node.id for node in functions if isinstance(node, ast.Name)}
    return any(name not in imported and not hasattr(builtins, name) for name in names)


def _computes(expression: ast.expr) -> bool:
    """Whether it calls or compares something."""
    if isinstance(expression, ast.Lambda):
        return False
    return not isinstance(expression, _CONSTANT) or any(
        _computes(part) for part in ast.iter_child_nodes(expression) if isinstance(part, ast.expr)
    )
