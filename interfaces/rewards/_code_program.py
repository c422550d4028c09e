"""The program's side of a test: loads the program, then answers calls. Runs in a sandbox.

The program may do anything here. All that leaves this process is the plain values it returns, to
tests that run in another sandbox.
"""

import json
import os
import sys
import types

from _code_values import decoded, encoded

requests, replies = os.fdopen(3, "r"), os.fdopen(4, "w")
objects = []


def handle(value):
    objects.append(value)
    return len(objects) - 1


def answer(target, method, arguments, named):
    # A name, or an expression from the row such as `Solution().add`:
    # this process runs untrusted code anyway.
    called = eval(target, vars(module)) if isinstance(target, str) else objects[target]
    if method is not None:
        called = getattr(called, method)
    if arguments is None:
        return {"value": encoded(called, handle), "given": []}
    values = [decoded(argument, objects.__getitem__) for argument in arguments]
    value = called(
        *values,
        **{name: decoded(argument, objects.__getitem__) for name, argument in named.items()},
    )
    return {
        "value": encoded(value, handle),
        "given": [encoded(argument, handle) for argument in values],
    }


module = types.ModuleType("program")
sys.modules["program"] = module
with open("program.py", encoding="utf-8") as file:
    exec(compile(file.read(), "program.py", "exec"), vars(module))
print(
    json.dumps([name for name, value in vars(module).items() if callable(value)]),
    file=replies,
    flush=True,
)
for request in requests:
    try:
        reply = answer(*json.loads(request))
    except Exception as problem:
        reply = {"raised": type(problem).__name__, "says": str(problem)[:1000]}
    print(json.dumps(reply), file=replies, flush=True)
