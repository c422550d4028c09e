"""Pictures of the README show what they say."""

import re

from pictures import PICTURE, live_view


def test_the_live_view_of_the_readme_is_that_of_the_recorded_run():
    assert PICTURE.read_text(encoding="utf-8") == live_view(), "python tests/house/pictures.py"


def test_the_live_view_loads_nothing():
    assert "url(" not in re.sub(r"url\(#", "", live_view())
