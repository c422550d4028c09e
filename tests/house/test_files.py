"""Reading JSON that others wrote."""

import json

import pytest

from rlcli.files import known_object, read_object


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"[" * 100_000])
def test_what_is_no_object_is_a_value_error_and_known_as_empty(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"Expecting|object|deep"):
        read_object(file)
    assert known_object(file) == {}


def test_a_file_that_is_missing_too_large_or_a_folder(tmp_path):
    large = tmp_path / "large.json"
    large.write_text(json.dumps({"a": "x" * 100}))
    assert read_object(large) == {"a": "x" * 100}
    for path, most in ((tmp_path / "missing.json", 1 << 20), (large, 99), (tmp_path, 1 << 20)):
        with pytest.raises(OSError, match=r"missing|more than|ordinary"):
            read_object(path, most)
        assert known_object(path, most) == {}
