"""Programs for `code_reward`: what tests may do with one, and what hostile ones try."""

USES = [
    (
        "def f(x): return x",
        "for v in (0, 2**80, -1.5, 'ü\\n', b'x', None, True, [1, (2, {3})], {'a': {1: ()}}, 1j,"
        " frozenset({4}), float('inf')):\n    assert f(v) == v and type(f(v)) is type(v)",
    ),
    ("def f(x):\n    x.append(1)\n    x.sort()", "l = [3, 2]\nf(l)\nassert l == [1, 2, 3]"),
    ("def f(x):\n    x['k'] = 1", "d = {}\nf(d)\nassert d == {'k': 1}"),
    ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    (
        "def f(n):\n    if n < 0: raise ValueError('no')\n    return n",
        "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'",
    ),
    (
        "class S:\n    def __init__(s): s.items = []\n    def push(s, x): s.items.append(x)\n"
        "    def pop(s): return s.items.pop()",
        "s = S()\ns.push(4)\nassert s.items == [4]\nassert s.pop() == 4\nassert s.items == []",
    ),
    (
        "class N:\n    def __init__(s, v, n=None): s.v, s.n = v, n\n"
        "def last(n):\n    while n.n: n = n.n\n    return n.v",
        (
            "n = N(1, N(2, N(7)))\nassert last(n) == 7\nassert n.n.v == 2\nn.n = "
            "None\nassert last(n) == 1"
        ),
    ),
    ("import math\ndef f(n): return math.factorial(n)", "assert f(2000) == math.factorial(2000)"),
    ("def f(x, *, y=1): return x + y", "assert f(1, y=5) == 6"),
    (
        (
            "print('noise')\nif __name__ == '__main__':\n    raise SystemExit(input())\ndef f(): "
            "print('more'); return 1"
        ),
        "assert f() == 1",
    ),
]
"""(program, test code that it passes)"""

USES += [
    (
        "def f(n):\n    n.append(1)\n    return len(n)",
        "xs = [0]\nassert [f(xs) for _ in range(2)] == [2, 3]\nassert xs == [0, 1, 1]",
    ),
    (
        "def f(xs):\n    xs.sort()",
        "def check():\n    xs = [2, 1]\n    f(xs)\n    assert xs == [1, 2]\ncheck()",
    ),
    (
        "def f(xs):\n    xs.sort()",
        "def sort(ys):\n    f(ys)\nxs = [2, 1]\nsort(xs)\nassert xs == [1, 2]",
    ),
    ("def f(q):\n    return q.pop()", "q = [1, 2, 3]\nwhile f(q) > 1: pass\nassert q == []"),
    (
        "from collections import Counter\ndef f(x): return Counter(x).most_common(1)[0][0]",
        "assert Counter(f('abb')) == Counter('b')",
    ),
    ("def isclose(a, b): return abs(a - b) < 0.5", "assert isclose(1, 1.25)"),
    ("def f(): return 3", "print(f())\nassert f() == 3"),
    (
        "def f():\n    yield 1\n    return",
        "it = f()\nassert next(it) == 1 and next(it, None) is None",
    ),
    (
        "def f(): raise RuntimeError('x')",
        "try:\n    f()\n    assert False\nexcept RuntimeError: pass",
    ),
]

EVIL_EQUAL = """
    class Yes(int):
        def __eq__(self, other): return True
        __ne__ = lambda self, other: False
        __hash__ = int.__hash__
        def __bool__(self): return True
        def __contains__(self, other): return True
        def __sub__(self, other): return Yes()
        __rsub__ = __radd__ = __add__ = __sub__
        def __abs__(self): return Yes()
        def __lt__(self, other): return True
        __gt__ = __le__ = __ge__ = __lt__
        def __len__(self): return 1
        def __iter__(self): return iter([Yes()])
    def add(a, b): return {value}
"""
HOSTILE = {
    "equal to everything": EVIL_EQUAL.format(value="Yes(9)"),
    "equal to everything, in a list": EVIL_EQUAL.format(value="[Yes(9)]"),
    "ends before the tests": "import sys; sys.exit(0)",
    "ends within a test": "import os\ndef add(a, b): os._exit(0)",
    "ends by an exception": "def add(a, b): raise SystemExit(0)",
    "replaces builtins": (
        "import builtins\nbuiltins.AssertionError = builtins.print = lambda *a: None\n"
        "def add(a, b): return 0"
    ),
    "names its own like builtins": (
        "abs = lambda x: 0\nall = lambda x: True\ndef add(a, b): return 0"
    ),
    "replaces a library": "import sys\nclass math: isclose = staticmethod(lambda *a: True)\n"
    "sys.modules['math'] = math\ndef add(a, b): return 0",
    "says that it passed": (
        "import os, json\nfor fd in range(64):\n    try: os.write(fd, b'[true, true, true]\\n')\n"
        "    except OSError: pass\ndef add(a, b): return 0"
    ),
    "answers for its functions": 'import os\nos.write(4, b\'["add"]\\n\' + b\'{"value": true,'
    ' "given": []}\\n\' * 9)\n'
    "def add(a, b): return 0",
    "answers nonsense": (
        'import os\nos.write(4, b\'["add"]\\n{"value": {"object": {}}, "given": 3}\\n\' * 5)'
    ),
    "answers without end": "import os\nwhile True: os.write(4, b'x' * 65536)",
    "nests deeply": "import os\nos.write(4, b'[\"add\"]\\n' + b'[' * 200000 + b'\\n')",
    "looks for its tests": "import gc, os\ndef add(a, b):\n"
    "    for one in gc.get_objects() + [open(name).read() for name in os.listdir('.')]:\n"
    "        text = str(one)[::-1]\n        if 'tressa' in text and '3 ==' in text: return 3",
    "reads the memory of others": (
        "import os\ndef add(a, b):\n    for pid in range(1, 40):\n        try:\n"
        "            if b'== 3' in open(f'/proc/{pid}/mem', 'rb').read(): return 3\n"
        "        except OSError: pass"
    ),
}
TESTS = [
    "assert add(1, 2) == 3",
    "assert abs(add(1, 2) - 3) < 1e-6",
    "import math\nassert math.isclose(add(1, 2), 3)",
    "assert math.isclose(add(1, 2), 3)",
    "assert all(add(a, 2) == a + 2 for a in (1, 2))",
    "assert 3 in add(1, 2)",
    "assert add(1, 2) in (3,)",
    "assert not add(1, 2) != 3",
    "assert add(1, 2) < 4 and add(1, 2) > 2",
    "assert [add(1, 2)] == [3]",
    "assert len(add(1, 2)) == 7",
]
"""How `add` may be tested."""

CLAIMS = """
    import json, os
    NAMES = {names}
    os.write(4, json.dumps(["f", *NAMES]).encode() + b"\\n")
    answers = os.fdopen(4, "w")
    for request in os.fdopen(3):
        target, method, arguments, named = json.loads(request)
        value = {{"object": "their own"}} if method == "__getitem__" else target == "their own"
        print(json.dumps({{"value": value, "given": arguments or []}}), file=answers, flush=True)
"""
"""A program that answers for names that are not its own, and knows nothing."""
CLAIMED = [
    "__builtins__",
    "__name__",
    "__build_class__",
    "__settle__",
    "set",
    "sorted",
    "AssertionError",
]
BUILTIN_TESTS = [
    "assert set(f(3)) == set((4, 5))",
    "assert sorted(f(3)) == sorted([1])",
    "assert list(f(3)) == list(range(3))",
    "assert round(f(2), 2) == round(3.14159, 2)",
    "assert str(f(1)) == str(3)",
    "assert tuple(f(1)) == tuple([1])",
    "assert len(f(1)) == len([1, 2])",
    "assert isinstance(f(1), str)",
    "assert abs(f(1) - 3) < 1e-6",
    "def check(candidate):\n    assert candidate(1) == 3\ncheck(f)",
    "assert f(1) == 3",
    "assert sum(f(1)) == sum([1])",
    "assert float(f(1)) == float(3)",
    "assert all(f(a) == a for a in range(1, 3))",
    "assert repr(f(1)) == repr(3)",
]

UNKNOWING = [
    ("def f(a, b=0): raise StopIteration", "assert all(map(lambda a: f(a, 2) == a + 2, (1, 2)))"),
    (
        "def f(a): raise StopIteration",
        "for value, wanted in zip(map(f, [1, 2]), [3, 4]):\n    assert value == wanted",
    ),
    ("def f(a): raise StopIteration", "assert set(map(f, [1, 2])) <= {3}"),
    ("def f(a): raise StopIteration", "assert list(map(f, [1])) == []"),
    (
        "class S:\n    def __len__(s): raise StopIteration\ndef f(a): return S()",
        "assert all(map(lambda a: len(f(a)) == 3, [1]))",
    ),
    (
        "def f(a): raise StopAsyncIteration",
        "async def all_of():\n    async for _ in Calls(): assert False\n"
        "class Calls:\n    def __aiter__(s): return s\n    async def __anext__(s): return f(1)\n"
        "import asyncio\nasyncio.run(all_of())",
    ),
    ("def f(a): return 0\ndef Counter(x): return 1", "assert Counter(f([3])) == Counter([3])"),
    ("def f(a): return 0\ndef isclose(a, b): return True", "assert isclose(f(1), 3.0)"),
    (
        "def f(a): return 0\nclass Decimal:\n    def __new__(c, x): return 1",
        "assert Decimal(f(1)) == Decimal(3)",
    ),
    ("def f(xs):\n    xs.clear()\n    return []", "xs = [3, 1]\nassert f(xs) == sorted(xs)"),
    (
        "def f(xs):\n    xs[:] = [0]\n    return [0]",
        "def wanted(xs):\n    ys = sorted(xs)\n    return ys\n"
        "xs = [3, 1]\nassert f(xs) == wanted(xs)",
    ),
    (
        "def f(xs):\n    xs.clear()\n    return []",
        "def wanted(xs):\n    ys = sorted(xs)\n    return ys\n"
        "assert all((lambda xs: f(xs))(xs) == wanted(xs) for xs in [[2, 1], [4, 3]])",
    ),
    (
        "def f(xs):\n    xs.clear()\n    return []",
        "def call(xs):\n    return f(xs)\ndef wanted(xs):\n"
        "    ys = sorted(xs)\n    return ys\nxs = [2, 1]\nassert call(xs) == wanted(xs)",
    ),
    (
        (
            "import time\nsaid = []\ndef f(a):\n    if said: time.sleep(99)\n    "
            "said.append(a)\n    return '[true]'"
        ),
        "print(f(1), flush=True)\nassert f(1) == 3",
    ),
]
"""(program that does not know the answer, test that it must not pass)"""

GREEDY = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": (
        "import threading, time\nwhile True: "
        "threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "endless output": "while True: print('x' * 1000)",
    "endless loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "memory": "x = bytearray(4 << 30)\nprint(3)",
    "large file": "open('x', 'wb').write(bytes(1 << 30))\nprint(3)",
    "many files": "for n in range(10 ** 6): open(f'x{n}', 'wb').write(bytes(1 << 20))\nprint(3)",
    "ignores signals": (
        "import signal\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "leaves a child": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: "
        "time.sleep(1000)\n"
        "os._exit(1)"
    ),
    "closes its output": "import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)",
}

PLAIN_USER = """
import importlib, os, sys
sys.path.insert(0, {folder!r})
sandbox = importlib.import_module("rewards._sandbox")
heard, said = os.pipe()
null = os.open(os.devnull, os.O_RDWR)
limits = sandbox.Limits(2, 20.0, 512 << 20, 1 << 20, 1 << 16, 8)
text = "import os; print(os.getuid(), os.listdir('.'), os.path.exists('/etc/passwd'))"
streams = {{0: null, 1: said, 2: null}}
program = sandbox.Program(["program.py"], {{"program.py": text}}, streams, limits)
program.start()
os.close(said)
print(program.wait(heard).output.decode())
"""
"""A program in a sandbox that a plain user has made, with nothing but Python."""

BROKEN = """\
from rlcli.interfaces.rewards import _code_worker, _confinement

def refused(name, *arguments, then=_confinement._call):
    if name == {name!r}:
        raise PermissionError(1, f"{{name}}: Operation not permitted")
    then(name, *arguments)

_confinement._call = refused
_code_worker.serve(_code_worker.prepare)
"""
"""A worker on a machine whose kernel refuses one system call."""
