"""What holds for all tests."""

import gc
import sys

from hypothesis import settings

# a busy machine is no fault of what is tested
settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")
# the command collects nothing while it reads a recipe; tests read thousands of them
gc.set_threshold(50_000, 10, 20)

MANY = 50
"""Modules that are imported between two tests when much has been made that stays."""
_known = 0
"""Modules when garbage was last told from what stays."""


def pytest_runtest_setup():
    """What libraries have made is not looked at again: some collect garbage each time that they are
    used, and pytest itself as it ends."""
    global _known
    if len(sys.modules) >= _known + MANY:
        gc.freeze()
        _known = len(sys.modules)
