"""Components by name: one component, one file, one name.

`interface: {type: grpo}` is `interfaces/grpo.py`. Names come from reading folders, arguments from
reading source text; a component's file is imported only when a run needs the class.
"""

from rlcli.api.component import (
    KINDS,
    register_backend,
    register_dataset,
    register_environment,
    register_interface,
)
from rlcli.registry.class_fields import COMPUTED, Argument
from rlcli.registry.listing import module_of, names, path_of
from rlcli.registry.loading import (
    environment_maker,
    load,
    load_declared,
    make_backend,
    make_dataset,
    make_environment,
    make_interface,
)
from rlcli.registry.signature import Signature, signature

__all__ = [
    "COMPUTED",
    "KINDS",
    "Argument",
    "Signature",
    "environment_maker",
    "load",
    "load_declared",
    "make_backend",
    "make_dataset",
    "make_environment",
    "make_interface",
    "module_of",
    "names",
    "path_of",
    "register_backend",
    "register_dataset",
    "register_environment",
    "register_interface",
    "signature",
]
