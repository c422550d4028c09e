"""The `launch` section of a recipe: in this process, on this machine, or as a Slurm job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rlcli.recipe.sections.base import NotNegative, Positive, Seconds, Section

# In `#SBATCH` lines spaces separate words, quotes and backslashes quote, and `#` begins a comment.
WORD = r"""^[^-\s"'\\#\x00-\x20\x7f][^\s"'\\#\x00-\x20\x7f]*$"""
TEXT = r"""^[^"\\\x00-\x1f\x7f]*$"""
LINE = r"^[^\x00\r\n]*$"
OPTION = r"^[a-z][a-z0-9-]{0,63}$"
TIME = r"^(\d{1,6}[smhd]|\d{1,7}|(\d{1,4}-)?\d{1,4}(:[0-5]?\d){0,2})$"
LONGEST = 4096
"""Maximum characters of a word or text; a pattern with this limit takes 0.1 s to compile."""
Word = Annotated[str, StringConstraints(pattern=WORD, max_length=LONGEST)]
Text = Annotated[str, StringConstraints(pattern=TEXT, max_length=LONGEST)]
Line = Annotated[str, StringConstraints(pattern=LINE)]
OptionName = Annotated[str, StringConstraints(pattern=OPTION)]
FORMATS = {
    WORD: "use one word without spaces, quotes, '\\' and '#', which does not start with '-'",
    TEXT: "use one line without double quotes and '\\'",
    LINE: "use one line",
    OPTION: "use the long name of an option of sbatch, without its dashes",
    TIME: "write 90m, 8h, 2d or 8:00:00; null is the partition's limit",
}
"""Pattern → how to write what does not match it."""


class Container(Section):
    """Container for the processes on each node; the supervisor and the master run outside it."""

    engine: Literal["none", "pyxis", "apptainer"] = "none"
    """pyxis: srun's `--container-image`; apptainer: `apptainer exec`. The run's folder is mounted
    at the same path."""
    image: str | None = None
    """The image, in the engine's notation."""
    mounts: list[str] = Field(default_factory=list)
    """Further folders that the processes need, in the engine's notation (`/data:/data`)."""
    python: str | None = None
    """The Python in the container that has rlcli; null: the path of the current one, which must
    then be mounted."""
    options: list[str] = Field(default_factory=list)
    """Further arguments for srun (pyxis) or `apptainer exec`, one per item."""


class Nodes(Section):
    """Which nodes a job gets."""

    partition: Word | None = None
    """Partition, or several separated by commas; null: the default one."""
    account: Word | None = None
    """Account to charge."""
    qos: Word | None = None
    """Quality of service."""
    reservation: Word | None = None
    """Reservation to use."""
    gres: Word | None = None
    """Devices per node (`gpu:h100:8`); null: cluster.devices_per_node GPUs,
    unless device is cpu."""
    constraint: Word | None = None
    """Features required of the nodes (`a100|h100`)."""
    nodelist: Word | None = None
    """Nodes that the job must include."""
    exclude: Word | None = None
    """Nodes that the job must not use."""
    cpus_per_task: Positive | None = None
    """Cores per node; null: 8 per GPU, or 2 per worker on CPUs."""


class JobPart(Nodes):
    """Some nodes of a heterogeneous job. Null: as for the whole job."""

    nodes: Positive
    """How many of the run's nodes, counted from the end of the previous part."""


class Slurm(Nodes):
    """Resources that a job requests from Slurm. Null leaves the choice to the cluster."""

    time: Annotated[str, StringConstraints(pattern=TIME)] | None = None
    """Time limit of each start: `90m`, `8h`, `2d`, or in Slurm's notation; null:
    the partition's limit."""
    parts: list[JobPart] = Field(default_factory=list)
    """Parts of a heterogeneous job, whose nodes differ: `[{nodes: 2}, {nodes: 1, partition:
    infer}]`. A part takes its number of nodes and, if they differ from the job's, any key from
    partition to cpus_per_task (`rlcli show launch.slurm.parts`)."""
    mail_type: Word | None = None
    """When to send mail (`END,FAIL`)."""
    mail_user: Word | None = None
    """Recipient of the mail."""
    dependency: Word | None = None
    """Jobs to wait for (`afterok:123`)."""
    options: dict[OptionName, Text | int | bool] = Field(default_factory=dict)
    """Any other sbatch option by its long name: `{mem: 0, exclusive: true, comment:
    a trial}`; false: omit it."""
    container: Container = Container()
    """Container for the processes on each node."""
    modules: list[Word] = Field(default_factory=list)
    """Environment modules to load (`cuda/12.8`)."""
    setup: list[Line] = Field(default_factory=list)
    """Lines of bash to run on the job's first node before the run;
    the other nodes inherit the variables."""
    template: str | None = None
    """A Jinja2 template that replaces rlcli's own for the batch script."""
    requeues: NotNegative = 3
    """How often a job may be requeued in a row without a newer checkpoint;
    after that the run ends."""


OF_NODES = tuple(name for name in Nodes.model_fields if name != "cpus_per_task")
OF_JOB = ("mail_type", "mail_user", "dependency")
"""Settings that sbatch has under the same name, of parts of a job and of all of it."""
OURS = ("array", "nodes", "ntasks-per-node", "job-name", "output", "error", "signal", "requeue",
        "no-requeue", "open-mode", "cpus-per-task", "time", "wrap", "parsable", "wait")  # fmt: skip
"""Options of sbatch that `options` cannot have, because the run depends on them or has a key for
them."""


class LaunchSection(Section):
    """How the workers are started."""

    type: Literal["inline", "local", "slurm"] = "inline"
    """inline: in one process, one device; local: one process per device on this machine, by
    torchrun. With several cluster.nodes, local starts that many nodes on this machine, each with
    its own temporary and working folder. slurm: as a job, with an agent on each node."""
    by_hand: bool = False
    """Start only the first node, and wait for the others: `rlcli plan --commands` prints the
    commands to start them."""
    interface: str | None = None
    """Network interface through which several nodes reach each other; null: lo if they are all on
    this machine, or, for a job on several nodes, each node's default route."""
    max_restarts: NotNegative = 0
    """Maximum number of restarts from the last checkpoint after a process of the run has died or
    hung."""
    startup_deadline: Seconds = 600.0
    """Seconds within which all workers must have loaded their models."""
    step_deadline: Seconds = 3600.0
    """Maximum seconds for one call of the graph."""
    slurm: Slurm = Slurm()
    """Settings of the job, with `type: slurm`."""
