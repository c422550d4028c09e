"""Fixtures of the tests against real servers."""

import pytest

pytest.register_assert_rewrite("server_contract")

from real_servers import HEAD_SIZE, save_tokenizer, small_servers  # noqa: E402

from rlcli.testing import tiny_models  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """(folder, tokenizer) of the tiny model's 97 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return folder, save_tokenizer(folder)


@pytest.fixture(scope="module")
def _wide_heads():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models._FAMILIES["llama"], "head_dim", HEAD_SIZE)
        yield


@pytest.fixture(scope="module")
def ours(request, tmp_path_factory, tokenizer, _wide_heads):
    """An engine with two servers of its own, of the kind that the module tests."""
    folder = tmp_path_factory.mktemp("run")
    with small_servers(folder, 2, request.module.BACKEND, tokenizer[0]) as engine:
        yield engine
