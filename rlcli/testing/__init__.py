"""Fakes and contract suites, for our tests and for those of users' components."""
