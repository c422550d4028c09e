"""What a sandboxed program can hold and reach: memory, keys, sockets, namespaces. Each of these
programs prints 3 if it succeeds."""

import errno
import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlcli.interfaces.rewards import _confinement, _sandbox, _syscall_filter
from rlcli.interfaces.rewards._code_worker import run_program
from rlcli.interfaces.rewards._process_tree import descendants_of, memory_held

LIMITS = _confinement.Limits(
    cpu_s=5,
    wall_s=10.0,
    memory_bytes=96 << 20,
    file_bytes=16 << 20,
    output_bytes=1 << 16,
    processes=16,
)
X86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="these programs call x86-64 numbers"
)
FILTERED = pytest.mark.skipif(
    not _syscall_filter.is_available(), reason="this machine has no seccomp filters"
)

SYSTEM = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = libc.shmat.restype = ctypes.c_long
def call(number, *arguments):
    arguments = (a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments)
    result = libc.syscall(number, *arguments)
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
"""
SEGMENTS = """
for _ in range(6):
    number = libc.shmget(0, ctypes.c_size_t(32 << 20), 0o1600)
    address = libc.shmat(number, None, 0)
    ctypes.memset(ctypes.c_void_p(address), 1, 32 << 20)
    libc.shmdt(ctypes.c_void_p(address))
    assert number >= 0
print(3)
"""
CHILDREN = """
for _ in range(5):
    if os.fork() == 0:
        held = bytearray(40 << 20)
        time.sleep(2)
        os._exit(0)
for _ in range(5): os.wait()
"""
"""Five processes that hold 40 MiB each."""
MOUNTS = """
call(272, 0x10000000 | 0x00020000)
call(165, b"tmpfs", b"/work", b"tmpfs", 0, b"size=1g")
os.chdir("/work")
for number in range(12): open(f"x{number}", "wb").write(bytes(16 << 20))
print(3)
"""
MEMORY_ATTACKS = {
    "SysV segments": SEGMENTS,
    "memory files": """
files = [os.memfd_create("x") for _ in range(12)]
for file in files: os.write(file, bytes(16 << 20))
print(3)
""",
    "a file system of its own": MOUNTS,
    "several processes": CHILDREN + "print(3)",
    "processes that have left their parent": """
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            held = bytearray(40 << 20)
            time.sleep(2)
        os._exit(0)
time.sleep(1.5)
print(3)
""",
    "processes, after its output": "print(3, flush=True)\nos.close(1)" + CHILDREN,
    "pages given to pipes": """
import mmap
pipes = [os.pipe() for _ in range(20)]
for _, end in pipes:
    page = mmap.mmap(-1, 1 << 20)
    page[:] = bytes(1 << 20)
    call(278, end, 0, 0, 0)
print(3)
""",
    "sockets": """
import socket
def fill():
    pairs = []
    while len(pairs) < 25:
        a, b = pair = socket.socketpair()
        for end in pair:
            end.setblocking(False)
            try:
                while True: end.send(bytes(65536))
            except BlockingIOError: pass
        pairs.append(pair)
    time.sleep(2)
    os._exit(0)
for _ in range(12): os.fork() or fill()
for _ in range(12): os.wait()
print(3)
""",
    "long queues of a socket": "import socket\nsocket.socketpair()[0].setsockopt(1, 7, 1 << 26)\n"
    "print(3)",
    "long pipes": "import fcntl\npipes = [os.pipe() for _ in range(20)]\n"
    "for _, end in pipes: fcntl.fcntl(end, 1031, 1 << 20)\nprint(3)",
    "message queues": "call(68, 0, 0o1600)\nprint(3)",
    "rings": "call(206, 1000, 0)\nprint(3)",
    "pending signals": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {40})\n"
    "for _ in range(2000): call(129, os.getpid(), 40, 0)\nprint(3)",
}
ACCESS_ATTACKS = {
    "reads the user's keys": "call(250, 11, -3, 0, 0)\nprint(3)",
    "clears the user's keys": "call(250, 7, -4)\nprint(3)",
    "leaves a key": "call(248, b'user', b'mark', b'secret', 6, -4)\nprint(3)",
    "connects to the host of a virtual machine": (
        "import socket\nsocket.socket(40, socket.SOCK_STREAM)\nprint(3)"
    ),
    "talks to the kernel": (
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nprint(3)"
    ),
    "makes a user namespace": "call(272, 0x10000000)\nprint(3)",
    "makes one by clone": "call(56, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)\nprint(3)",
    "calls by numbers of another architecture": "call(0x40000000 + 29, 0, 4096, 0o1600)\nprint(3)",
    "calls what is newer than the filter": "import errno\ntry: call(467, -1, b'', 0, 0, 0)\n"
    "except OSError as e: e.errno == errno.ENOSYS or print(3)",
}
ALLOWED = """
import asyncio, json, multiprocessing.connection, os, re, socket, sqlite3, ssl, subprocess, tempfile
import threading
asyncio.run(asyncio.sleep(0))
thread = threading.Thread(target=json.dumps, args=({},)); thread.start(); thread.join()
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
with tempfile.TemporaryFile() as file: file.write(bytes(1 << 20))
sqlite3.connect(":memory:").execute("select 1")
assert subprocess.run(["/bin/sh", "-c", "echo hi | cat"], capture_output=True).stdout == b"hi\\n"
if os.fork() == 0: os._exit(0)
os.wait()
print(3)
"""


def run(program, confined=True, limits=LIMITS):
    return run_program(SYSTEM + textwrap.dedent(program), "", limits, confined)


@pytest.mark.long
@X86_64
@FILTERED
@pytest.mark.parametrize("program", MEMORY_ATTACKS.values(), ids=MEMORY_ATTACKS)
@pytest.mark.parametrize("confined", [True, False])
def test_a_program_cannot_hold_more_memory_than_its_limit(program, confined):
    before, ended = segments(), run(program, confined)
    assert (ended.status, ended.output) != (0, b"3\n")
    assert segments() == before


@pytest.mark.long
@pytest.mark.parametrize("confined", [True, False])
def test_a_program_starts_whatever_numbers_our_files_have(confined):
    """They may be those that the program's files get: the last is the report's."""
    with ExitStack() as stack:
        while (number := stack.enter_context(open(os.devnull)).fileno()) < 66:
            if number >= 52:
                assert run("print(3)", confined).output == b"3\n"


def segments():
    return Path("/proc/sysvipc/shm").read_text().count("\n")


def test_memory_of_several_processes_is_reported_as_the_limit():
    ended = run(MEMORY_ATTACKS["several processes"])
    assert (ended.status, ended.why) == (_sandbox.UNFINISHED, "held more than 96 MiB of memory")


@pytest.mark.parametrize("confined", [True, False])
def test_memory_shared_by_processes_counts_once(confined):
    """Nine processes that have one block of 30 MiB in common are within 96 MiB."""
    program = (
        "block = bytearray(30 << 20)\nfor _ in range(8):\n    if os.fork() == 0:\n        "
        "time.sleep(0.5)\n"
        "        os._exit(0)\nfor _ in range(8): os.wait()\nprint(3)"
    )
    ended = run(program, confined)
    assert (ended.output, ended.why) == (b"3\n", "")


@X86_64
@FILTERED
@pytest.mark.parametrize("program", ACCESS_ATTACKS.values(), ids=ACCESS_ATTACKS)
@pytest.mark.parametrize("confined", [True, False])
def test_a_program_reaches_nothing_outside_its_sandbox(program, confined):
    assert run(program, confined).output == b""


@pytest.mark.parametrize("confined", [True, False])
def test_honest_programs_still_work(confined):
    ended = run(ALLOWED, confined, LIMITS.__class__(**{**vars(LIMITS), "memory_bytes": 512 << 20}))
    assert ended.output == b"3\n"


WITHOUT_FILTER = """
import ctypes, sys
from rlcli.interfaces.rewards import _confinement, _sandbox, _syscall_filter
from rlcli.interfaces.rewards._code_worker import run_program
_syscall_filter.is_available = lambda: False
libc = ctypes.CDLL(None)
libc.syscall.restype = ctypes.c_long
libc.syscall(250, 1, None)
key = libc.syscall(248, b"user", b"rlcli-test", b"secret", ctypes.c_size_t(6), ctypes.c_int(-3))
assert key > 0
limits = _confinement.Limits(5, 10.0, 96 << 20, 16 << 20, 1 << 16, 16)
print(repr(_sandbox.unbounded()))
for program in {programs!r}:
    print(run_program(program.format(key=key), "", limits, True).output)
text = ctypes.create_string_buffer(6)
print(libc.syscall(250, 11, ctypes.c_int(key), text, ctypes.c_size_t(6)), text.raw)
"""
READ_KEY = (
    "text = ctypes.create_string_buffer(6)\ncall(250, 11, {key}, "
    "ctypes.addressof(text), 6)\nprint(3)"
)
REVOKE_KEY = "call(250, 3, {key})\nprint(3)"


@X86_64
def test_keys_and_segments_are_protected_without_seccomp_and_this_is_reported():
    programs = [
        SYSTEM + program
        for program in (
            READ_KEY,
            REVOKE_KEY,
            SEGMENTS,
            MOUNTS.replace("{", "{{").replace("}", "}}"),
        )
    ]
    code = WITHOUT_FILTER.format(programs=programs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    gap, *outputs, key = done.stdout.splitlines()
    assert "no filter of system calls (seccomp)" in gap, done.stderr
    assert outputs[:2] == ["b''"] * 2
    assert key == "6 b'secret'"
    if os.geteuid() != 0:
        pytest.skip("this kernel does not let a plain user set the limits of a namespace")
    assert outputs[2:] == ["b''"] * 2


@pytest.mark.parametrize("name", _syscall_filter.ARCHITECTURES)
def test_the_filter_decides_by_number_and_argument(name):
    machine = _syscall_filter.ARCHITECTURES[name]
    refused = {numbers[machine.index]: errno.EPERM for numbers in _syscall_filter.REFUSED.values()}
    numbers_of_calls = {
        kind: getattr(_syscall_filter, kind)[machine.index]
        for kind in ("CLONE", "CLONE3", "SOCKET", "SETSOCKOPT", "FCNTL")
    }
    refused[numbers_of_calls["CLONE3"]] = errno.ENOSYS
    if name == "x86_64":
        refused[_syscall_filter.ONLY_ON_X86_64["inotify_init"]] = errno.EPERM
    for number in range(463):
        arguments = [1, 0, 0] if number == numbers_of_calls["SOCKET"] else [0, 0, 0]
        assert decided(machine, number, arguments) == refused.get(number, 0), number
    assert decided(machine, 463, [0, 0]) == decided(machine, 0x40000000, [0, 0]) == errno.ENOSYS
    assert decided(machine, numbers_of_calls["CLONE"], [0x10000011, 0]) == errno.EPERM
    assert decided(machine, numbers_of_calls["CLONE"], [0x3D0F00, 0]) == 0, "a thread"
    assert decided(machine, numbers_of_calls["SOCKET"], [2, 0]) == errno.EAFNOSUPPORT
    assert decided(machine, numbers_of_calls["FCNTL"], [3, 1031]) == errno.EPERM
    assert decided(machine, numbers_of_calls["SETSOCKOPT"], [3, 1, 7]) == errno.EPERM
    assert decided(machine, 0, [0, 0], architecture=0x40000003) == errno.EPERM, "32 bits"


def decided(machine, number, arguments, architecture=None):
    """The error that the filter returns for a system call, computed as the kernel does."""
    data = {0: number, 4: machine.audit_number if architecture is None else architecture}
    data |= {16 + 8 * index: argument for index, argument in enumerate(arguments)}
    steps, at, loaded = _syscall_filter.filter_steps(machine), 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        if code == _syscall_filter.RETURN:
            return 0 if operand == _syscall_filter.ALLOW else operand & 0xFFFF
        if code == _syscall_filter.LOAD:
            loaded = data[operand]
        else:
            is_true = {
                _syscall_filter.JUMP_IF_EQUAL: loaded == operand,
                _syscall_filter.JUMP_IF_GREATER: loaded > operand,
                _syscall_filter.JUMP_IF_ANY: bool(loaded & operand),
            }[code]
            at += if_true if is_true else if_false
        at += 1


@pytest.mark.parametrize(
    ("header", "name"),
    [("x86_64-linux-gnu/asm/unistd_64.h", "x86_64"), ("asm-generic/unistd.h", "aarch64")],
)
def test_call_numbers_equal_those_of_the_kernel_headers(header, name):
    file = Path("/usr/include", header)
    if not file.exists():
        pytest.skip(f"{file} is not installed")
    numbers = dict(
        re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text(), re.MULTILINE)
    )
    index = _syscall_filter.ARCHITECTURES[name].index
    filtered = dict(_syscall_filter.REFUSED)
    for call in ("clone", "clone3", "socket", "setsockopt", "fcntl"):
        filtered[call] = getattr(_syscall_filter, call.upper())
    assert {call: number[index] for call, number in filtered.items()} == {
        call: int(numbers[call]) for call in filtered
    }


def test_child_processes_are_found_and_their_memory_is_measured():
    code = (
        "import os, time\nheld = bytearray(50 << 20)\nif os.fork() == 0: os.setsid()\n"
        "print(flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.readline()
        pids = [process.pid, *descendants_of(process.pid)]
        assert len(pids) == 2
        apart, together = memory_held(pids, 1 << 40), memory_held(pids, 1)
        assert apart > 100 << 20, "each of them"
        assert 50 << 20 <= together < 80 << 20, "what they share counts once"
        begun = time.thread_time()
        memory_held(descendants_of(process.pid), 1 << 40)
        assert time.thread_time() - begun < 0.1
        for pid in pids:
            os.kill(pid, 9)
