"""Fixtures of the tests against real servers."""

import pytest
from real_servers import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """(folder, tokenizer) of the tiny model's 97 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return folder, save_tokenizer(folder)
