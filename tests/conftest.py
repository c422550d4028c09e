"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("patient", parent=settings(), deadline=None)  # a busy machine is no fault of what is tested
settings.load_profile("patient")
