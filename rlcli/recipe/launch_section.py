"""The section `launch` of a recipe: in this process, on this machine, or as a job of Slurm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rlcli.recipe.section import NotNegative, Positive, Seconds, Section

# In `#SBATCH` lines blanks separate, quotes and backslashes quote, and `#` begins a comment.
Word = Annotated[str, StringConstraints(pattern=r"""^[^-\s"'\\#\x00-\x20\x7f][^\s"'\\#\x00-\x20\x7f]{0,4095}$""")]
Text = Annotated[str, StringConstraints(pattern=r"""^[^"\\\x00-\x1f\x7f]{0,4095}$""")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00\r\n]*$")]
OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,63}$")]
TIME = r"^(\d{1,6}[smhd]|\d{1,7}|(\d{1,4}-)?\d{1,4}(:[0-5]?\d){0,2})$"


class Container(Section):
    """The container that the processes of each node run in; the supervisor and the master run outside of it."""

    engine: Literal["none", "pyxis", "apptainer"] = "none"
    """pyxis: srun's `--container-image`; apptainer: `apptainer exec`. The run's folder is mounted where it is."""
    image: str | None = None
    """The image, as the engine names it."""
    mounts: list[str] = Field(default_factory=list)
    """More folders that the processes need, as the engine takes them (`/data:/data`)."""
    python: str | None = None
    """The Python in the container that has rlcli; null: this one's path, which must then be mounted."""
    options: list[str] = Field(default_factory=list)
    """More arguments for srun (pyxis) or `apptainer exec`, one per item."""


class Slurm(Section):
    """What a job asks Slurm for. What is null is left to the cluster."""

    partition: Word | None = None
    """Partition, or several, separated by commas; null: the default one."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    reservation: Word | None = None
    """Reservation to use."""
    time: Annotated[str, StringConstraints(pattern=TIME)] | None = None
    """Time limit of each start: `90m`, `8h`, `2d`, or as Slurm writes it; null: that of the partition."""
    gres: Word | None = None
    """Devices of a node (`gpu:h100:8`); null: as many GPUs as cluster.devices_per_node, unless device is cpu."""
    constraint: Word | None = None
    """Features that nodes must have (`a100|h100`)."""
    nodelist: Word | None = None
    """Nodes that must be among those of the job."""
    exclude: Word | None = None
    """Nodes that must not."""
    mail_type: Word | None = None
    """When to write a mail (`END,FAIL`)."""
    mail_user: Word | None = None
    """To whom."""
    dependency: Word | None = None
    """Jobs to wait for (`afterok:123`)."""
    cpus_per_task: Positive | None = None
    """Cores of a node; null: 8 for each GPU, 2 for each worker on CPUs."""
    options: dict[OptionName, Text | int | bool] = Field(default_factory=dict)
    """Any other option of sbatch by its long name: `{mem: 0, exclusive: true, comment: a trial}`; false: without it."""
    container: Container = Container()
    """What the processes of each node run in."""
    modules: list[Word] = Field(default_factory=list)
    """Environment modules to load (`cuda/12.8`)."""
    setup: list[Line] = Field(default_factory=list)
    """Lines of bash that the job runs before the run, on its first node; the other nodes inherit the variables."""
    template: str | None = None
    """A Jinja2 template that replaces the one of rlcli for the batch script."""
    requeues: NotNegative = 3
    """How often in a row a job is put back into the queue without a newer checkpoint; then the run ends."""


class Launch(Section):
    """How the workers are started."""

    type: Literal["inline", "local", "slurm"] = "inline"
    """inline: in one process, one device; local: one process per device on this machine, by torchrun. With several
    cluster.nodes local starts as many on this machine, each with a temporary and a working folder of its own.
    slurm: as a job, with an agent on each of its nodes."""
    by_hand: bool = False
    """Start the first node only, and wait for the others: `rlcli plan --commands` prints how to start them."""
    interface: str | None = None
    """Network interface through which several nodes reach each other; null: lo, as all of them are on this machine, or,
    for a job on several nodes, that of each node's default route."""
    max_restarts: NotNegative = 0
    """Restarts from the last checkpoint after a process of the run has died or hung."""
    startup_deadline: Seconds = 600.0
    """Seconds until all workers must have loaded their models."""
    step_deadline: Seconds = 3600.0
    """Seconds that one call of the graph may take."""
    slurm: Slurm = Slurm()
    """What a job asks for, with `type: slurm`."""
