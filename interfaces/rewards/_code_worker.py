"""A process that runs candidate programs in sandboxes. Started by `code_reward`, as a script.

It knows what the tests pass to a program but not the output they expect:
that is compared elsewhere.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from rlcli.interfaces.rewards._confinement import Limits
from rlcli.interfaces.rewards._sandbox import Ended, NoSandbox, Program, memory_file, pipe
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
    with (
        FileIO(os.devnull, "r+b") as null,
        memory_file(stdin.encode(errors="surrogatepass")) as input_file,
        pipe() as output,
    ):
        errors = output.writing if with_errors else null
        streams = {0: input_file.fileno(), 1: output.writing.fileno(), 2: errors.fileno()}
        files = {"program.py": program}
        with Program(["program.py"], files, streams, limits, confined) as running:
            running.start()
            output.writing.close()
            return running.wait(output.reading.fileno())


def run_tests(
    task: dict[str, Any], sources: dict[str, str], limits: Limits, confined: bool
) -> dict[str, Any]:
    """Run a program in one sandbox and its tests in another, connected by pipes;
    report which tests pass."""
    tests_file = json.dumps({"tests": task["tests"], "entry_point": task["entry_point"]})
    with (
        FileIO(os.devnull, "r+b") as null,
        pipe() as requests,
        pipe() as replies,
        pipe() as marks,
    ):

        def script(name: str, files: dict[str, str], ends: dict[int, FileIO]) -> Program:
            files |= {file: sources[file] for file in (name, "_code_values.py")}
            streams = {0: null, 2: null, **ends}
            descriptors = {number: end.fileno() for number, end in streams.items()}
            return Program([name], files, descriptors, limits, confined)

        program_ends = {1: null, 3: requests.reading, 4: replies.writing}
        test_ends = {1: marks.writing, 3: replies.reading, 4: requests.writing}
        with (
            script("_code_program.py", {"program.py": task["program"]}, program_ends) as program,
            script("_code_tests.py", {"tests.json": tests_file}, test_ends) as tests,
        ):
            program.start()
            tests.start()
            for end in {*program_ends.values(), *test_ends.values()} - {null}:
                end.close()
            ended = tests.wait(marks.reading.fileno(), partner=program)
    try:
        return {"passed": json.loads(ended.output if ended.status == 0 else ""), "limit": ended.why}
    except ValueError:
        return {
            "passed": [False] * len(task["tests"]),
            "limit": ended.why or f"ended its tests ({ended.status})",
        }


if __name__ == "__main__":
    serve(prepare)
