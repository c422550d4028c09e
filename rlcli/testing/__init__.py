"""Fakes and contract suites, for our own tests and for those of users' components."""
