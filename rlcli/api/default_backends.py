"""The default backend of a role. No other code of rlcli names a backend."""

from __future__ import annotations

TRAINED = "fsdp"
"""For a role with weights that some call trains."""
UNTRAINED = "inference"
"""For a role with weights that no call trains."""
WEIGHTLESS = "null"
"""For a role without weights."""
