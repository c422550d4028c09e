"""Runs that tests submit as a user does, in a project of their own."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from toy_project import RECIPE, make_project

from rlcli.launch.slurm.allocations import read_allocations
from rlcli.launch.slurm.jobs import Submission, look_up_one
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.tail import Tail

from .cluster import wait_for

HOME = str(Path(__file__).parents[2])
BY_SLURM = ("launch=slurm", "launch.interface=lo", "launch.slurm.cpus_per_task=1")
HERE = ("launch=local",)
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
PATIENCE = 150.0
"""Seconds for a run of a few steps: every start takes a while on a slow machine."""


class Project:
    """A folder with a recipe, and the components for it."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        make_project(folder)
        (folder / "toy.yaml").write_text(RECIPE)

    def rlcli(self, *arguments, code=0):
        """Run the command to its end, in the project."""
        done = subprocess.run(
            [sys.executable, "-m", "rlcli", *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
            env={**self.cluster.environment, "PYTHONPATH": HOME, "OMP_NUM_THREADS": "1"},
            timeout=PATIENCE,
        )
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done

    def submit(self, *overrides, run_dir="run", recipe="toy.yaml", options=()):
        """A run that is a job."""
        report = self.rlcli(
            "train", recipe, "--run-dir", run_dir, "--json", *options, *BY_SLURM, *overrides
        ).stdout
        return self.run(Path(json.loads(report)["folder"]))

    def run(self, folder):
        return Run(self.cluster, folder)

    def pretend(self, name, state, body, *options, array_suffix=""):
        """A run that records only its state; `body` is the script of the job recorded as its own.
        `array_suffix`: of the only job of an array, such as `_2`."""
        folder = self.folder / "runs/toy" / name
        with RunDirectory.create(folder, "toy", command=["rlcli"]) as run:
            run.write_status(state, 2, 4)
        script = self.folder / f"{name}.sh"
        script.write_text(f"#!/bin/bash\n{body}\n")
        submit = ["sbatch", "--parsable", "--output=/dev/null", "--requeue", *options, str(script)]
        job = self.cluster.run(*submit).strip() + array_suffix
        Submission(job, None, "2026-11-22T23:41:52+00:00").write(folder)
        owner = {"host": "elsewhere", "pid": 99, "started": "earlier"}
        (folder / "lock").write_text(json.dumps({"owner": owner, "supervisor": None}))
        return self.run(folder)

    def here(self, *overrides, run_dir="here", recipe="toy.yaml"):
        """The same as processes of this machine, to its end."""
        self.rlcli("train", recipe, "--run-dir", run_dir, "--quiet", *HERE, *overrides)
        return self.folder / run_dir


class Run:
    """A run that was submitted."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        self.job = Submission.read(folder).job_id
        self._seen = 0
        """Allocations that have ended."""

    @property
    def status(self):
        return json.loads((self.folder / "status.json").read_text())

    @property
    def log(self):
        """What its processes have written."""
        files = sorted((self.folder / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in files)

    @property
    def steps(self):
        """That are done, by its metrics."""
        (last,) = Tail(self.folder / "metrics.jsonl").last(1) or [b'{"step": 0}']
        return json.loads(last)["step"]

    def state(self):
        """Of the job, as Slurm calls it."""
        job = look_up_one(self.job)
        return job.slurm_state if job is not None else None

    def wait_for(self, condition, seconds=PATIENCE):
        """Fails with the logs if the job ends before."""

        def is_so():
            if condition():
                return True
            state = self.state()
            assert state in (
                "PENDING",
                "CONFIGURING",
                "RUNNING",
                "COMPLETING",
                "REQUEUED",
                "SUSPENDED",
            ), f"{state}\n{self.log}"
            return False

        wait_for(is_so, seconds)

    def wait_for_steps(self, count):
        self.wait_for(lambda: self.steps >= count)

    def wait_until(self, state, seconds=PATIENCE):
        """Until its job is in that state."""
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: self.state() in (state, *OVER), seconds)
        job = self.cluster.run("scontrol", "show", "job", self.job)
        assert self.state() == state, f"{self.log}\n{self.cluster.log}\n{job}"

    def wait_until_put_back(self):
        """Until it is in the queue after an allocation."""
        wait_for(lambda: len(read_allocations(self.folder)) > self._seen, PATIENCE)
        self._seen = len(read_allocations(self.folder))
        self.wait_until("PENDING")

    def begin_again(self):
        """Have a job that was put back into the queue begin soon, and not after Slurm's two
        minutes. Not in the second in which it was: nodes would take it for the one that they have
        just ended."""
        self.cluster.run("scontrol", "update", f"jobid={self.job}", "starttime=now+2")
