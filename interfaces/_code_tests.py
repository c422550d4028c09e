"""The tests' side: they run here, out of the program's reach. Runs in a sandbox.

Tests use the program's functions by name, through proxies that have the program's process do the work. Results come
back as plain values of this process, so no class of the program decides a comparison. A value that is not plain stays
there, and equals only itself.
"""

import builtins
import importlib
import json
import os
import sys

from _code_values import decoded, encoded

replies, requests = os.fdopen(3, "r"), os.fdopen(4, "w")
LONGEST = 1 << 24
"""Most characters of a reply."""


class ProgramEnded(Exception):
    """The program has ended, or sent an invalid reply."""


def ask(target, method, arguments, named):
    """Have the program call something; without arguments (None), look up an attribute. Lists changed by the call are
    changed here too."""
    try:
        given = None if arguments is None else [encoded(one, number_of) for one in arguments]
        message = [target, method, given, {name: encoded(one, number_of) for name, one in named.items()}]
        print(json.dumps(message), file=requests, flush=True)
        reply = heard()
        raised = reply.get("raised")
        value = None if raised is not None else decoded(reply["value"], Standing)
        after = [] if raised is not None else [decoded(one, [].append) for one in reply["given"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as problem:
        raise ProgramEnded(str(problem)[:200]) from None
    if raised is not None:
        kind = getattr(builtins, str(raised), None)
        is_known = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if is_known else Exception)(str(reply.get("says")))
    for one, changed in zip(arguments or (), after, strict=False):
        if type(one) is type(changed) is list:
            one[:] = changed
        elif type(one) is type(changed) and type(one) in (dict, set):
            one.clear()
            one.update(changed)
    return value


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
    """Names available to tests: the program's functions and classes, which may not shadow builtins or the library."""
    given = heard()
    names = {name: Standing(name) for name in given if isinstance(name, str) and not hasattr(builtins, name)}
    for name in sys.stdlib_module_names:
        if any(name in test for test in tests):
            names.pop(name, None)
            try:
                names[name] = importlib.import_module(name)
            except ImportError:
                continue
    if entry_point is not None:
        names = {name: value for name, value in names.items() if not isinstance(value, Standing)}
        names[entry_point] = names["candidate"] = Standing(entry_point)
    return names


def run(test, entry_point, names):
    before = names.get("check")
    exec(compile(test, "test", "exec"), names)
    if entry_point is not None and names.get("check") is not before:
        names["check"](names[entry_point])


def passed(tests, entry_point):
    try:
        names = {"__builtins__": builtins, "__name__": "test", **names_for_tests(tests, entry_point)}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return [False] * len(tests)
    results = []
    for test in tests:
        try:
            run(test, entry_point, names)
            results.append(True)
        except BaseException:  # SystemExit in a test is a failure too
            results.append(False)
    return results


with open("tests.json", encoding="utf-8") as file:
    given = json.load(file)
print(json.dumps(passed(given["tests"], given["entry_point"])), flush=True)
