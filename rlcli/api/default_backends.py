"""The backend of a role that names none. Nowhere else does rlcli name one."""

from __future__ import annotations

TRAINED = "fsdp"
"""Of a role with weights that some call trains."""
UNTRAINED = "inference"
"""Of one that no call trains."""
WEIGHTLESS = "null"
"""Of a role without weights."""
