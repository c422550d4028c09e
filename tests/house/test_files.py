"""Reading JSON written by other programs."""

import json

import pytest

from rlcli.files import known_object, read_object


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"[" * 100_000])
def test_json_other_than_an_object_is_a_value_error_or_empty(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"Expecting|object|deep"):
        read_object(file)
    assert known_object(file) == {}


def test_a_missing_or_too_large_file_or_a_folder_is_an_os_error_or_empty(tmp_path):
    large = tmp_path / "large.json"
    large.write_text(json.dumps({"a": "x" * 100}))
    assert read_object(large) == {"a": "x" * 100}
    for path, most in ((tmp_path / "missing.json", 1 << 20), (large, 99), (tmp_path, 1 << 20)):
        with pytest.raises(OSError, match=r"missing|more than|ordinary"):
            read_object(path, most)
        assert known_object(path, most) == {}
