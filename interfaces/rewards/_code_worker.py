"""A process that runs candidate programs in sandboxes. Started by `code_reward`, as a script.

It knows what the tests pass to a program but not the output they expect:
that is compared elsewhere.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcli.interfaces.rewards._sandbox import Ended, Limits, NoSandbox, Program
from rlcli.interfaces.rewards._worker import Broken, Work, serve

HERE = Path(__file__).parent


def prepare(settings: dict[str, Any]) -> Work:
    most, confined = Limits(**settings["limits"]), settings["confined"]
    sources = {path.name: path.read_text(encoding="utf-8") for path in HERE.glob("_code_*.py")}
    try:
        tried = run_program("print(6 * 7)", "", most, confined)
    except NoSandbox as problem:
        raise Broken(str(problem)) from problem
    if tried.output != b"42\n":
        raise Broken(
            f"a program that prints 42 prints {tried.output[:80]!r}; status "
            f"{tried.status}. {tried.why}"
        )

    def work(task: dict[str, Any]) -> dict[str, Any]:
        limits = replace(most, wall_s=min(most.wall_s, task["wall_s"]))
        try:
            if "stdin" in task:
                ended = run_program(task["program"], task["stdin"], limits, confined)
                return {
                    "output": ended.output.decode(errors="replace"),
                    "status": ended.status,
                    "limit": ended.why,
                }
            return run_tests(task, sources, limits, confined)
        except (OSError, MemoryError) as problem:
            return {"error": f"{type(problem).__name__}: {problem}"}

    return work


def run_program(
    program: str, stdin: str, limits: Limits, confined: bool, *, with_errors: bool = False
) -> Ended:
    """Run a program as a script: what it writes to stdout, given its stdin; `with_errors`: and to
    stderr. Raises NoSandbox."""
    null = os.open(os.devnull, os.O_RDWR)
    stdin_file = os.memfd_create("stdin")
    os.write(stdin_file, stdin.encode(errors="surrogatepass"))
    os.lseek(stdin_file, 0, os.SEEK_SET)
    output, output_in = os.pipe()
    try:
        descriptors = {0: stdin_file, 1: output_in, 2: output_in if with_errors else null}
        running = Program(["program.py"], {"program.py": program}, descriptors, limits, confined)
        os.close(output_in)
        return running.wait(output)
    finally:
        for descriptor in (null, stdin_file, output):
            os.close(descriptor)


def run_tests(
    task: dict[str, Any], sources: dict[str, str], limits: Limits, confined: bool
) -> dict[str, Any]:
    """Run a program in one sandbox and its tests in another, connected by pipes;
    report which tests pass."""
    null = os.open(os.devnull, os.O_RDWR)
    requests_out, requests_in = os.pipe()
    replies_out, replies_in = os.pipe()
    marks, marks_in = os.pipe()
    tests_file = json.dumps({"tests": task["tests"], "entry_point": task["entry_point"]})
    programs = []
    try:
        for name, files, descriptors in (
            (
                "_code_program.py",
                {"program.py": task["program"]},
                {1: null, 3: requests_out, 4: replies_in},
            ),
            (
                "_code_tests.py",
                {"tests.json": tests_file},
                {1: marks_in, 3: replies_out, 4: requests_in},
            ),
        ):
            files |= {file: sources[file] for file in (name, "_code_values.py")}
            programs.append(
                Program([name], files, {0: null, 2: null, **descriptors}, limits, confined)
            )
        for descriptor in (requests_out, requests_in, replies_out, replies_in, marks_in):
            os.close(descriptor)
        ended = programs[1].wait(marks, partner=programs[0])
    finally:
        for program in programs:
            program.end()
        os.close(null)
        os.close(marks)
    try:
        return {"passed": json.loads(ended.output if ended.status == 0 else ""), "limit": ended.why}
    except ValueError:
        return {
            "passed": [False] * len(task["tests"]),
            "limit": ended.why or f"ended its tests ({ended.status})",
        }


if __name__ == "__main__":
    serve(prepare)
