"""`rlcli tokens`: which tokens of a row are trained on, as text, with ids,
as JSON and as a page."""

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.data import Preview
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.inspect.token_marks import Token, tokens_of
from rlcli.inspect.token_page import PageRow, token_page
from rlcli.registry import load

RECIPE = """\
extends: base/sft
models:
  actor:
    scratch: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
    tokenizer: tok
datasets:
  train: {type: prompt_answer, args: {path: rows.jsonl}}
  pairs: {type: paired, args: {path: pairs.jsonl}}
train: {steps: 1, prompts_per_step: 1}
"""


@pytest.fixture
def rlcli(rlcli, tmp_path, monkeypatch):
    """Run the command line in a folder with mine.yaml: (exit code, stdout, stderr)."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    load("datasets", "arithmetic").make_tokenizer().save_pretrained(tmp_path / "tok")
    rows = [
        {"prompt": "1+1?\n", "answer": "2\nyes"},
        {"prompt": "<b>\x1b[31m&é🙂", "answer": "\u202e4"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "3?", "pos_answers": ["3"], "neg_answers": ["4"]}'
    )
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return rlcli


def test_trained_tokens_are_marked(rlcli):
    code, out, err = rlcli("tokens", "mine.yaml", "--row", "1")
    assert code == 0
    header, *rest = out.splitlines()
    assert header == "row 1 of train · 11 tokens · 5 trained"
    assert rest == ["<bos>1+1?⏎", "▐2⏎", "yes<eos>▌", "id      rows:1", "from    rows.jsonl:1"]
    assert "▐ … ▌" in err


def test_control_characters_in_rows_are_escaped(rlcli):
    out = rlcli("tokens", "mine.yaml", "--row", "2")[1]
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "<b>\\x1b[31m&é🙂▐" in out
    assert "\\u202e4" in out


def test_a_terminal_with_colours_shows_no_marks(rlcli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out = rlcli("tokens", "mine.yaml")[1]
    assert "\x1b[32m2" in out
    assert "▐" not in out


def test_a_prompt_is_shown_with_the_start_of_the_response_and_the_answer(rlcli):
    code, out, err = rlcli("tokens", "ppo_math", "--row", "3")
    assert (code, err) == (0, "")
    assert out.startswith("row 3 of train · ")
    assert "a prompt\n" in out
    assert "?⏎\n▐ the response follows, up to 64 tokens ▌\n" in out
    assert out.splitlines()[-1].startswith("answer  ")


def test_both_sequences_of_a_pair_are_shown(rlcli):
    out = rlcli("tokens", "mine.yaml", "--dataset", "pairs")[1]
    assert "in 2 sequences · 4 trained" in out
    assert "sequence 1 of 2\n<bos>3?▐3<eos>▌\nsequence 2 of 2\n<bos>3?▐4<eos>▌" in out


def test_ids_of_tokens_are_listed(rlcli):
    out = rlcli("tokens", "mine.yaml", "--ids")[1]
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows[0] == ["0", "1", "-", "'<bos>'"]
    assert rows[-1][2:] == ["yes", "'<eos>'"]


def test_tokens_as_json(rlcli):
    document = json.loads(rlcli("tokens", "mine.yaml", "--row", "2", "--json")[1])
    assert (document["dataset"], document["row"], document["where"]) == ("train", 2, "rows.jsonl:2")
    (tokens,) = document["sequences"]
    assert "".join(token["text"] for token in tokens) == "<bos><b>\x1b[31m&é🙂\u202e4<eos>"
    assert [token["trained"] for token in tokens].index(True) > 0
    assert tokens[-1] == {"id": 2, "text": "<eos>", "trained": True, "special": True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--row", "3"], "dataset train has no row 3\n  hint: its rows are 1 to 2"),
        (["--row", "0"], "has no row 0"),
        (["--dataset", "trian"], "no dataset 'trian'\n  hint: it has train, pairs"),
        (["--html", "none/x.html"], "none/x.html: not writable"),
    ],
)
def test_mistakes(rlcli, arguments, says):
    code, out, err = rlcli("tokens", "mine.yaml", *arguments)
    assert code in (2, 6)
    assert out == ""
    assert says in err


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.addresses, self.names = [], "", [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_is_self_contained_and_escaped(rlcli, tmp_path):
    code, out, _ = rlcli("tokens", "mine.yaml", "--row", "2", "--html", "page.html")
    assert (code, out) == (0, "wrote page.html\n")
    page = (tmp_path / "page.html").read_text()
    reader = _Reader()
    reader.feed(page)
    assert "b" not in reader.tags
    assert "script" not in reader.tags
    assert reader.addresses == []
    assert "<b>\\x1b[31m&é🙂" in reader.text
    assert "http" not in page


def test_links_lead_from_row_to_row(rlcli, tmp_path):
    code, out, _ = rlcli("tokens", "mine.yaml", "--html", "page.html")
    assert (code, out) == (0, "wrote page.html: rows 1 to 2\n")
    reader = _Reader()
    reader.feed((tmp_path / "page.html").read_text())
    assert reader.addresses == ["#row2", "#row1"]
    assert reader.names == ["row1", "row2"]
    assert "row 2 →row 1 of train" in reader.text
    document = json.loads(rlcli("tokens", "mine.yaml", "--html", "page.html", "--json")[1])
    assert document == {"file": "page.html", "rows": [1, 2]}


def test_a_page_of_a_prompt_mentions_the_response():
    sequences = [[Token(1, "a\n", False, False)]]
    page = token_page([PageRow(0, "t", [("id", "<x>")], sequences, "the response follows")])
    assert "<dd>&lt;x&gt;</dd>" in page
    assert 'title="1, masked">a⏎' in page
    assert "the response follows</span>" in page


@given(text=st.text(), cut=st.integers(0, 3))
def test_texts_of_tokens_add_up_to_the_decoded_text(text, cut):
    tokenizer = LightTokenizer(*load("datasets", "arithmetic").tokenizer_parts())
    ids = tokenizer(text).input_ids
    ids = ids[: len(ids) - cut]
    (tokens,) = tokens_of(Preview(id="x", sequences=[ids]), tokenizer)
    assert "".join(token.text for token in tokens) == tokenizer.decode(ids)


def test_control_characters_are_escaped_in_a_page():
    tokens, facts = [Token(1, "a\x1b\u202e", False, False)], [("id\u202e", "x\x00")]
    page = token_page([PageRow(0, "t\x1b[2J", facts, [tokens], "\x07")])
    assert not set("\x1b\x00\x07\u202e") & set(page)
    assert "\\u202e" in page
