"""What holds for all tests."""

import gc

from hypothesis import settings

settings.register_profile("patient", parent=settings(), deadline=None)  # a busy machine is no fault of what is tested
settings.load_profile("patient")
gc.set_threshold(50_000, 10, 20)  # the command collects nothing while it reads a recipe; tests read thousands of them


def pytest_collection_finish():
    gc.freeze()  # thousands of tests, and all that they import, stay until the end
