"""`rlcli push`: a trained model to the Hub, with a card from the record of its run."""

from __future__ import annotations

from typing import Annotated

import typer

from rlcli.cli import arguments as options
from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import UsageError
from rlcli.units import count


def push(
    run: options.RunName,
    to: Annotated[
        str, typer.Option("--to", metavar="OWNER/NAME", help="The repository on the Hub.")
    ],
    role: options.RoleName = None,
    step: options.StepNumber = None,
    private: Annotated[
        bool, typer.Option("--private", help="A new repository is for you alone.")
    ] = False,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> None:
    """Upload a model of a run to the Hub in one commit: its files, its learning curve, the recipe,
    and a model card that says how it was trained. The weights of an earlier model are removed from
    the repository. `hf auth login` gives access.

    Example: rlcli push runs/ppo_math/20260412-093011 --to me/arithmetic
    """
    from rlcli.launch.hub_upload import CARD, files_to_push, upload
    from rlcli.launch.trained_model import trained_model
    from rlcli.recipe.named_files import HUB_ID

    if not HUB_ID.fullmatch(to):
        raise UsageError(
            f"{to!r} does not name a repository", where="--to", hint="write OWNER/NAME"
        )
    with trained_model(run, role, step) as trained:
        if trained.run is None:
            hint = "hf upload sends any folder to the Hub"
            raise UsageError(f"{run} is not a run, so there is nothing to say of it", hint=hint)
        files = files_to_push(trained, to)
        address = None if dry_run else upload(files, to, trained.described, private)
    if as_json:
        print_json({"address": address, "files": sorted(files)})
    elif dry_run:
        print_text(bytes(files[CARD]).decode())
        print_talk(f"{count(len(files), 'file')} would be uploaded: {', '.join(sorted(files))}")
    else:
        print_text(str(address))
