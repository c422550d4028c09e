"""A model of a run on the Hub: which files it consists of there, and their upload in one commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.api.weight_files import INDEX, inside
from rlcli.errors import ResourceError
from rlcli.launch.trained_model import TrainedModel
from rlcli.observe.model_card import model_card
from rlcli.observe.run_comparison import recorded_recipe
from rlcli.observe.trackers.redaction import Redactor
from rlcli.recipe.parsing.write import to_yaml

CARD = "README.md"
OF_THE_RUN = (RESOLVED_RECIPE, "curve.png")
"""Files of the run that are uploaded too, if they are there."""

OF_A_MODEL = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    INDEX,
    "chat_template.jinja",
    "additional_chat_templates/*",
)
"""Files of an earlier model that transformers would read instead of those of the new one, or in
addition to them."""

Files = dict[str, Path | bytes]
"""Name on the Hub → the file, or its content."""


def files_to_push(trained: TrainedModel, repository: str) -> Files:
    """The files of a run's model on the Hub, its card included. Raises ResourceError F72,
    DataError F31, or ModelError S7 for a link to a file of this machine."""
    assert trained.run is not None
    model = Path(trained.source)
    own_files = (inside(model, file) for file in sorted(model.rglob("*")))
    of_model = {file.relative_to(model).as_posix(): file for file in own_files}
    of_run = {name: inside(trained.run, trained.run / name) for name in OF_THE_RUN}
    card = model_card(trained.run, trained.role or "", repository, model, trained.step)
    files: Files = {name: file for name, file in (of_model | of_run).items() if file.is_file()}
    return files | {CARD: card.encode()} | _without_secrets(trained.run)


def _without_secrets(run: Path) -> Files:
    """The recipe of a run, if it has secrets, without them."""
    recipe = recorded_recipe(run)
    shown = Redactor(os.environ).value(recipe)
    return {} if shown == recipe else {RESOLVED_RECIPE: to_yaml(shown).encode()}


def upload(files: Mapping[str, Path | bytes], repository: str, model: str, private: bool) -> str:
    """Upload files in one commit, into a new repository if there is none; returns its address. It
    removes weights and chat templates of a model that was there before. `model`: its description,
    for the commit's message. Raises ResourceError."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        before = (name for name in api.list_repo_files(repository) if name not in files)
        removed = [CommitOperationDelete(name) for name in before if _is_of_a_model(name)]
        message = f"Upload {model}"
        commit = api.create_commit(repository, [*added, *removed], commit_message=message)
    except LocalTokenNotFoundError:
        raise _refused(repository, "nobody is logged in", "hf auth login") from None
    except HfHubHTTPError as error:
        raise _refused(repository, *_reason(error.response.status_code)) from None
    except Exception as error:
        if not isinstance(error, (*HfHubHTTPError.__bases__, OSError)):  # of connections
            raise
        hint = "HF_ENDPOINT names another address of the Hub"
        raise _refused(repository, f"no connection: {error}", hint) from None
    return str(commit.repo_url)


def _is_of_a_model(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in OF_A_MODEL)


def _reason(status: int) -> tuple[str, str]:
    """Why the Hub has refused, and what to do about it."""
    reasons = {
        401: ("it does not know who you are", "hf auth login"),
        403: ("you may not write there", "choose a repository of yours, or a token that may write"),
        429: ("too many requests", "try again later"),
    }
    return reasons.get(status, (f"HTTP status {status}", "try again later"))


def _refused(repository: str, reason: str, hint: str) -> ResourceError:
    return ResourceError(f"the Hub did not take {repository}: {reason}", where="--to", hint=hint)
