"""The tests' side: they run here, out of the program's reach. Runs in a sandbox.

Tests use the program's functions by name, through proxies that have the program's process do the
work. Results come back as plain values of this process, so no class of the program decides a
comparison. A value that is not plain stays there, and equals only itself.
"""

import ast
import builtins
import importlib
import json
import os
import sys

from _code_values import decoded, encoded

replies, requests = os.fdopen(3, "r"), os.fdopen(4, "w")
LONGEST = 1 << 24
"""Most characters of a reply."""
LIBRARY = {
    "collections": ("ChainMap", "Counter", "OrderedDict", "defaultdict", "deque"),
    "copy": ("deepcopy",),
    "datetime": ("date", "timedelta"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "functools": ("cmp_to_key", "partial", "reduce"),
    "itertools": ("chain", "islice", "starmap", "zip_longest"),
    "math": (
        "ceil",
        "fabs",
        "floor",
        "fsum",
        "isclose",
        "isfinite",
        "isinf",
        "isnan",
        "sqrt",
        "trunc",
    ),
    "operator": ("attrgetter", "itemgetter"),
}
"""What tests compare with and often forget to import: next to a function of the program,
these are the library's."""
SETTLE = "__settle__"


class ProgramEnded(Exception):
    """The program has ended, or sent an invalid reply."""


def ask(target, method, arguments, named):
    """Have the program call something; without arguments (None), look up an attribute. What the
    call changes in its arguments is changed here too, once the statement of the test has ended."""
    try:
        sent = (
            None
            if arguments is None
            else [encoded(latest(argument), number_of) for argument in arguments]
        )
        message = [
            target,
            method,
            sent,
            {name: encoded(latest(value), number_of) for name, value in named.items()},
        ]
        print(json.dumps(message), file=requests, flush=True)
        reply = heard()
        raised = reply.get("raised")
        value = None if raised is not None else decoded(reply["value"], Standing)
        after = (
            []
            if raised is not None
            else [decoded(argument, [].append) for argument in reply["given"]]
        )
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as problem:
        raise ProgramEnded(str(problem)[:200]) from None
    if raised is not None:
        raise exception_of(str(raised), method)(str(reply.get("says")))
    frames = statements_of(sys._getframe(1))
    for argument, changed in zip(arguments or (), after, strict=False):
        if type(argument) is type(changed) and type(argument) in (list, dict, set):
            unsettled.append((frames, argument, changed))
    return value


def exception_of(name, method):
    """The class of an exception that the program reports.
    One that ends a loop would end a loop of the test."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return Exception
    ends_a_loop = issubclass(kind, StopIteration | StopAsyncIteration)
    return (
        kind
        if not ends_a_loop or (kind is StopIteration and method == "__next__")
        else RuntimeError
    )


unsettled = []
"""Changes to arguments: the statements in progress at the call, the argument, its new value."""


def latest(argument):
    """The value of an argument after the program's last change."""
    return next(
        (changed for _, changing, changed in reversed(unsettled) if changing is argument), argument
    )


def settle():
    """Apply the changes of statements that have ended: `f(xs)
    == sorted(xs)` compares with what the test passed."""
    here = sys._getframe(1)
    running = statements_of(here)
    for change in tuple(unsettled):
        frames, argument, changed = change
        if next((frame for frame in frames if frame in running), here) is here:
            unsettled.remove(change)
            argument.clear()
            (argument.extend if type(argument) is list else argument.update)(changed)


def statements_of(frame):
    """The frames of the test that are executing a statement, innermost first;
    a lambda is part of one."""
    frames = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "test" and (
            code.co_name == "<module>" or not code.co_name.startswith("<")
        ):
            frames.append(frame)
        frame = frame.f_back
    return frames


def settling(tree):
    """The test with a call of `settle` before each statement."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(
                    node,
                    field,
                    [step for statement in statements for step in settled_before(statement)],
                )
    return ast.fix_missing_locations(tree)


def settled_before(statement):
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return [statement]
    call = ast.Expr(ast.Call(ast.Name(SETTLE, ast.Load()), [], []))
    return [ast.copy_location(call, statement), statement]


def number_of(value):
    if type(value) is Standing:
        return object.__getattribute__(value, "_number")
    raise TypeError(f"a {type(value).__name__} cannot be handed to a program")


def heard():
    line = replies.readline(LONGEST)
    if not line.endswith("\n"):
        raise ValueError("the program has ended")
    return json.loads(line)


class Standing:
    """Proxy for a function or an object of the program."""

    def __init__(self, number):
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments, **named):
        return ask(self._number, None, arguments, named)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(self._number, name, None, {})

    def __setattr__(self, name, value):
        ask(self._number, "__setattr__", (name, value), {})

    def __len__(self):
        try:
            return ask(self._number, "__len__", (), {})
        except AttributeError as problem:
            raise TypeError(str(problem)) from None

    def __getitem__(self, key):
        return ask(self._number, "__getitem__", (key,), {})

    def __iter__(self):
        return ask(self._number, "__iter__", (), {})

    def __next__(self):
        return ask(self._number, "__next__", (), {})

    def __str__(self):
        return str(ask(self._number, "__str__", (), {}))


def names_for_tests(tests, entry_point):
    """Names available to tests: the program's functions and classes,
    which may not shadow builtins or the library."""
    names = {name: Standing(name) for name in heard() if isinstance(name, str) and may_claim(name)}
    for name, module in library_of(tests, names).items():
        names.pop(name, None)
        try:
            imported = importlib.import_module(module)
        except ImportError:
            continue
        names[name] = imported if name == module else getattr(imported, name)
    if entry_point is not None:
        names = {name: value for name, value in names.items() if not isinstance(value, Standing)}
        names[entry_point] = names["candidate"] = Standing(entry_point)
    return names


def may_claim(name):
    """Whether a program may be the one that defines a name: it replaces no builtin."""
    return not hasattr(builtins, name)


def library_of(tests, names):
    """Name → module, for what is the library's: modules, and parts of LIBRARY if something else is
    tested too."""
    modules = {
        name: name for name in sys.stdlib_module_names if any(name in test for test in tests)
    }
    used = {
        node.id for test in tests for node in ast.walk(parsed(test)) if isinstance(node, ast.Name)
    }
    parts = {name: module for module, parts in LIBRARY.items() for name in parts if name in used}
    tested = [name for name in used if name in names and name not in parts and name not in modules]
    return (parts if tested else {}) | modules


def parsed(test):
    try:
        return ast.parse(test, "test")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def run(test, entry_point, names):
    before = names.get("check")
    exec(compile(settling(ast.parse(test, "test")), "test", "exec"), names)
    if entry_point is not None and names.get("check") is not before:
        names["check"](names[entry_point])


def passed(tests, entry_point):
    try:
        names = names_for_tests(tests, entry_point)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return [False] * len(tests)
    names |= {"__builtins__": builtins, "__name__": "test", SETTLE: settle}
    results = []
    for test in tests:
        try:
            run(test, entry_point, names)
            results.append(True)
        except BaseException:  # SystemExit in a test is a failure too
            results.append(False)
    return results


results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what tests print is not their result
with open("tests.json", encoding="utf-8") as file:
    row = json.load(file)
print(json.dumps(passed(row["tests"], row["entry_point"])), file=results, flush=True)
