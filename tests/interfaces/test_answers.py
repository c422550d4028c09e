import pytest

from rlcli.interfaces._answers import final_answer, quick_match, truth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 6\nno, wait\n#### 7 \nthe end", "7"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("first \\boxed{1}, then \\boxed{{2}+3}", "{2}+3"),
        ("\\boxed{unfinished", None),
        ("The answer is 3.5. Good.", "3.5"),
        ("Final answer: 12\nmore", "12"),
        ("an answer is 1, but the answer is 2!", "2"),
        ("\\boxed{1} #### 2", "2"),
        ("7 8 9", None),
        ("####", None),
        ("", None),
        ("#### " + "1" * 501, None),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


def test_last_number_is_opt_in_and_last():
    assert final_answer("we get 1,200 then -3/4 left", last_number=True) == "-3/4"
    assert final_answer("1,200.5 apples", last_number=True) == "1,200.5"
    assert final_answer("#### 5\nsee page 9", last_number=True) == "5"
    assert final_answer("nothing", last_number=True) is None


def test_truth():
    assert truth("Ann has 3 + 4 = <<3+4=7>>7 apples.\n#### 7") == "7"
    assert truth(" 42 ") == "42"
    assert truth("thus \\boxed{x+1}") == "x+1"


@pytest.mark.parametrize(
    ("answer", "expected", "verdict"),
    [
        ("7", "7", True),
        ("$7$", "7", True),
        ("$1,234.50", "1234.5", True),
        ("7.", "7", True),
        ("07", "7", True),
        ("8", "7", False),
        ("-7", "7", False),
        ("700", "7", False),
        ("0.07", "7", False),
        ("1/2", "0.5", True),
        ("\\frac{1}{2}", ".5", True),
        ("\\dfrac{1}{3}", "0.333", False),
        ("50\\%", "50", True),
        ("1/0", "1", None),
        ("Paris", "paris", True),
        ("x+1", "1+x", None),
        ("1,2", "12", None),
        ("9" * 5000, "7", None),
    ],
)
def test_quick_match(answer, expected, verdict):
    assert quick_match(answer, expected) is verdict
