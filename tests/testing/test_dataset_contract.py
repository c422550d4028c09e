"""The contract of datasets: a small correct dataset passes, and each fault is reported."""

import inspect
import itertools
import json
import re
from unittest.mock import Mock

import pytest

from rlcli.errors import DataError
from rlcli.testing.contract import Violation
from rlcli.testing.dataset import DatasetContract
from rlcli.testing.dataset_checks.elsewhere import as_read
from rlcli.testing.dataset_checks.outlines import HABITS
from rlcli.testing.dataset_checks.trial import Trial, rows_in
from rlcli.testing.runner import run_checks
from rlcli.testing.subjects import Subject
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

CORRECT_SOURCE = '''\
"""Prompts and answers from a file of JSON lines."""

import json
import random
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.data import DatasetUtility, Preview, SequenceSample, register_dataset
from rlcli.errors import DataError


@register_dataset("NAME")
@dataclass
class Tiny:
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "answer": "4"},
        {"prompt": "A colour?", "answer": "grün"},
        {"prompt": "And another, please?", "answer": "blue"},
    )

    util: DatasetUtility
    path: str
    """A file of JSON lines."""
    max_length: int = 100
    """Longest row, in tokens."""

    def __post_init__(self):
        self.rows = []
        with open(self.path, "rb") as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    self.rows.append(self.read(text, f"{self.path}:{line}"))

    def read(self, text, where):
        try:
            row = json.loads(text)
            texts = row["prompt"], row["answer"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"no row: {error}", where=where) from error
        if not all(isinstance(text, str) and text for text in texts):
            raise DataError("prompt and answer must be texts", where=where)
        tokens = self.encode(*texts)
        if len(tokens[0]) + len(tokens[1]) > self.max_length:
            raise DataError("too long", where=where)
        return str(row.get("id", where.rpartition("/")[2])), tokens, texts, where

    def encode(self, prompt, answer):
        tokenizer = self.util.tokenizer
        if tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            render = tokenizer.apply_chat_template
            text = render(message, tokenize=False, add_generation_prompt=True)
            before = tokenizer(text, add_special_tokens=False).input_ids
        else:
            before = [tokenizer.bos_token_id, *
                      tokenizer(prompt, add_special_tokens=False).input_ids]
        tokens = tokenizer(answer, add_special_tokens=False).input_ids
        return before, [*tokens, tokenizer.eos_token_id]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        import torch

        id_, (prompt, answer), *_ = self.rows[index]
        return SequenceSample.from_default(
            ids=[id_],
            seqlens=[len(prompt) + len(answer)],
            data={
                "packed_input_ids": torch.tensor([*prompt, *answer]),
                "prompt_mask": torch.tensor([True] * len(prompt) + [False] * len(answer)),
            },
        )

    def preview(self, index):
        id_, (prompt, answer), (question, words), where = self.rows[index]
        answered = Preview.answered
        return answered(prompt, [answer], id=id_, where=where, prompt=question, answers=[words])
'''
NUMBERS = itertools.count()


@pytest.fixture
def make_trial(tmp_path, monkeypatch):
    """The dataset with some of its text changed, in a project of its own."""
    project = tmp_path / "project"
    (project / "datasets").mkdir(parents=True)
    (project / "pyproject.toml").write_text("[tool.rlcli]\n")
    monkeypatch.setenv("RLCLI_PROJECT", str(project))

    def make(*changes, args=None, rows=()):
        name, text = f"tiny_{next(NUMBERS)}", CORRECT_SOURCE
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (project / "datasets" / f"{name}.py").write_text(text.replace("NAME", name))
        return Trial(name, args or {}, tmp_path, byte_tokenizer(), rows)

    return make


class TestCorrectDataset(DatasetContract):
    """No false alarm on a dataset that uses nothing of ours but the contract itself."""

    @pytest.fixture(autouse=True)
    def set_name(self, make_trial):
        self.name = make_trial().name


def violation(trial, check, *parameters):
    """The violation that a check reports."""
    with pytest.raises(Violation) as caught:
        getattr(DatasetContract(), check)(trial, *parameters)
    return caught.value


ROW = "id_, (prompt, answer), *_ = self.rows[index]"
ADDED = 'self.rows.append(self.read(text, f"{self.path}:{line}"))\n'
TENSOR = "torch.tensor([*prompt, *answer])"


def afterwards(statement):
    """A change: do this once all rows are read."""
    return ADDED, f"{ADDED}        {statement}\n"


WRONG = {
    "undocumented": (
        ('    """Longest row, in tokens."""\n', ""),
        "test_registers",
        "max_length",
        "put a string under it",
    ),
    "undeclared keys": (
        ("    KEYS: ClassVar", "    KINDS: ClassVar"),
        "test_registers",
        "does not say what its samples hold",
        "KEYS",
    ),
    "other keys": (
        ('"prompt_mask")', '"mask")'),
        "test_samples_are_valid",
        "row 0: it holds packed_input_ids, prompt_mask",
        "",
    ),
    "token ids as int32": (
        (TENSOR, f"{TENSOR}.int()"),
        "test_samples_are_valid",
        "packed_input_ids is of torch.int32",
        "",
    ),
    "unknown tokens": (
        (TENSOR, "torch.tensor([999, *prompt[1:], *answer])"),
        "test_samples_are_valid",
        "tokens from .* to 999",
        "",
    ),
    "an empty mask": (
        ("[False] * len(answer)", "[True] * len(answer)"),
        "test_special_tokens",
        "row 0, with a .*: a sequence is BOS, prompt, untrained EOS",
        "mask the prompt",
    ),
    "two rows of one id": (
        ('"/")[2])', '"/")[0])'),
        "test_ids",
        "3 of 3 rows have the id",
        "file and line",
    ),
    "ids by the seed": (
        ("return str(row", "return str(self.util.seed) + str(row"),
        "test_ids",
        "ids change with the run's seed",
        "from the rows",
    ),
    "an unseeded shuffle": (
        afterwards("random.shuffle(self.rows)"),
        "test_determinism",
        r"built twice with one seed, row \d",
        "stable_seed",
    ),
    "a global seed": (
        afterwards("random.seed(self.util.seed)"),
        "test_determinism",
        "of the whole process: random",
        "stable_seed",
    ),
    "hash()": (
        ('where.rpartition("/")[2]', "hash(where.rpartition('/')[2])"),
        "test_elsewhere",
        "row 0: id is .* in a process with PYTHONHASHSEED=",
        "stable_seed",
    ),
    "state": (
        (ROW, f"self.rows.append(self.rows.pop(0)); {ROW}"),
        "test_any_order",
        "the second time, row 0: its id",
        "resumed",
    ),
    "no end": (
        (ROW, ROW.replace("[index]", "[index % len(self.rows)]")),
        "test_rows_end",
        "there is a row 3",
        "IndexError",
    ),
    "a shared tensor": (
        (TENSOR, f"self.__dict__.setdefault(str(index), {TENSOR})"),
        "test_no_shared_state",
        "after samples were changed, row 0: packed_input_ids",
        "copy",
    ),
    "its neighbours": (
        (ROW, f"{ROW}; answer = self.rows[0][1][1]"),
        "test_neighbours",
        "in reverse order, row 'own-2'",
        "row alone",
    ),
    "overlapping shards": (
        afterwards("self.rows = self.rows[self.util.dp_rank :]"),
        "test_ranks",
        "0 on no rank, 4 on several ranks",
        "world_size",
    ),
    "lost rows": (
        afterwards(
            "n = self.util.world_size; self.rows = self.rows[self.util.dp_rank : "
            "len(self.rows) // n * n : n]"
        ),
        "test_ranks",
        "of 5 rows on 2 ranks 1 on no rank, 0 on several ranks",
        "world_size",
    ),
    "a digest of ids": (
        (
            "    def __len__",
            (
                "    def digest(self):\n        return str([row[0] for row in "
                "self.rows])\n\n    def __len__"
            ),
        ),
        "test_digest",
        "with other words in row 0 the digest is the same",
        "every row's id",
    ),
    "a line that is not told": (
        ("where=where) from error", ") from error"),
        "test_malformed_rows",
        r"a row that is cut off, in line 3, ends in no row: .*, without rows.jsonl:3",
        "where=",
    ),
    "a crash": (
        ("TypeError, KeyError, ", ""),
        "test_odd_fields",
        "without 'prompt', in line 3, ends in KeyError",
        "DataError",
    ),
    "rows passed over": (
        (
            'raise DataError(f"no row: {error}", where=where) from error',
            'texts, row = ("?", "!"), {}',
        ),
        "test_malformed_rows",
        "a row that is cut off is accepted as if it were good",
        "where=",
    ),
    "one too many": (
        ("> self.max_length", "> self.max_length + 1"),
        "test_overlong_refused",
        r"a row has \d+ tokens, max_length is",
        "EOS",
    ),
    "another preview": (
        ("[answer], id=id_", "[answer[1:]], id=id_"),
        "test_preview",
        "row 0: sequences is",
        "the two cannot differ",
    ),
    "another line": (
        ("where=where, prompt", "where=where + '0', prompt"),
        "test_places",
        "own-0, is said to stand at .*:10",
        "from 1",
    ),
    "an argument without effect": (
        (
            "    max_length: int",
            '    shuffled: bool = False\n    """Mixed."""\n    max_length: int',
        ),
        "test_every_argument_matters",
        "shuffled has no effect: results are the same with False and True",
        "NO_EFFECT_ON_NUMBERS",
    ),
    "a variant that remembers": (
        (
            "    max_length: int",
            '    mixed: bool = False\n    """Mixed."""\n    max_length: int',
        ),
        (ROW, f"self.mixed and self.rows.append(self.rows.pop(0)); {ROW}"),
        "test_every_variant",
        "with mixed=True: the second time, row 0: its id",
        "resumed",
    ),
    "a column by its usual name": (
        (
            "    max_length: int",
            '    prompt_key: str = "prompt"\n    """Field."""\n    max_length: int',
        ),
        ('row["prompt"]', 'row.get("prompt", "?")'),
        "test_columns_are_found_by_their_names",
        "when the column prompt of its rows has another name and prompt_key is that, row 0: ",
        "prompt_key names",
    ),
    "a column that is not read": (
        (
            "    max_length: int",
            '    hint_key: str | None = None\n    """Field."""\n    max_length: int',
        ),
        "test_columns_are_found_by_their_names",
        "samples are the same whatever is in the column that hint_key names",
        "use it",
    ),
    "a stripped argument": (
        (
            "    max_length: int",
            '    before: str = ""\n    """Text."""\n    max_length: int',
        ),
        ('texts = row["prompt"],', 'texts = self.before.replace("{}", "") + row["prompt"],'),
        "test_texts_of_arguments_are_kept_as_written",
        "the argument before is .*, which is not in its tokens",
        "as it is",
    ),
    "draws without the seed": (
        (ROW, f"{ROW}; answer = answer * random.Random(id_).randint(1, 2)"),
        "test_draws_depend_on_the_seed",
        "equal rows with other ids give other samples, but another seed",
        "stable_seed",
    ),
    "metadata that say nothing": (
        (
            "            ids=[id_],",
            '            ids=[id_],\n            metadata={"source": [None]},',
        ),
        "test_metadata_are_not_always_null",
        "source of the metadata is null in every row",
        "fill it",
    ),
}
PARAMETERS = {"test_ranks": (2,), "test_special_tokens": (next(iter(HABITS)),)}


@pytest.mark.parametrize("fault", WRONG)
def test_a_faulty_dataset_is_reported_with_cause_and_line(make_trial, fault):
    *changes, check, finding, cause = WRONG[fault]
    trial = make_trial(*changes)
    caught = violation(trial, check, *PARAMETERS.get(check, ()))
    assert re.search(finding, caught.finding), caught.finding
    assert cause in caught.cause
    file, _, line = caught.where.rpartition(":")
    assert file.endswith(f"datasets/{trial.name}.py")
    assert 1 <= int(line) <= CORRECT_SOURCE.count("\n")


LINES = "enumerate(file, start=1)"


@pytest.mark.parametrize(
    ("lines", "finding"),
    [
        ("[json.dumps(row) for row in json.load(file)[1:]]", "3 rows, then 2"),
        ("[json.dumps(row).lower() for row in json.load(file)]", "row 0: packed_input_ids "),
    ],
)
def test_rows_that_mean_something_else_in_another_format_are_reported(make_trial, lines, finding):
    by_suffix = f"enumerate({lines} if self.path.endswith('.json') else file, start=1)"
    caught = violation(make_trial((LINES, by_suffix)), "test_formats_mean_the_same")
    assert re.search(f"with its rows in a .json file, {finding}", caught.finding)


def test_formats_that_a_dataset_does_not_read_are_no_fault(make_trial):
    DatasetContract().test_formats_mean_the_same(make_trial())


CHAT, CLOSING, PLAIN = sorted(HABITS)


@pytest.mark.parametrize(
    ("old", "new", "habit", "finding"),
    [
        ("[tokenizer.bos_token_id, *", "[*", PLAIN, "prompt, answer, EOS"),
        (
            "tokenizer(text, add_special_tokens=False)",
            "tokenizer(text)",
            CHAT,
            "BOS, BOS, prompt, answer, EOS",
        ),
        (
            "tokenizer(answer, add_special_tokens=False)",
            "tokenizer(answer)",
            CLOSING,
            "BOS, prompt, trained BOS, answer, EOS",
        ),
        (", tokenizer.eos_token_id]", "]", PLAIN, "BOS, prompt, answer"),
        (
            ", tokenizer.eos_token_id]",
            ", *[tokenizer.eos_token_id] * 2]",
            PLAIN,
            "BOS, prompt, answer, EOS, EOS",
        ),
        (
            "tokenizer(prompt, add_special_tokens=False).input_ids]",
            "tokenizer(prompt, add_special_tokens=False).input_ids, tokenizer.eos_token_id]",
            PLAIN,
            "BOS, prompt, untrained EOS, answer, EOS",
        ),
    ],
)
def test_wrong_special_tokens_are_reported(make_trial, old, new, habit, finding):
    caught = violation(make_trial((old, new)), "test_special_tokens", habit)
    assert re.search(f"row 0, with a .*: a sequence is {finding}$", caught.finding), caught.finding
    assert caught.cause


BEGIN = "before = [tokenizer.bos_token_id, *"
UNUSUAL = {
    "a chat trained on its last answer": [
        (BEGIN, "before = [tokenizer.bos_token_id, 9, tokenizer.eos_token_id, *")
    ],
    "raw text": [
        (BEGIN, "before = [*"),
        (', "prompt_mask")', ",)"),
        (
            (
                '                "prompt_mask": torch.tensor([True] * len(prompt) + '
                "[False] * len(answer)),\n"
            ),
            "",
        ),
    ],
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_special_tokens_are_accepted(make_trial, case):
    DatasetContract().test_special_tokens(make_trial(*UNUSUAL[case]), PLAIN)


SHARDS = "self.rows = self.rows[self.util.dp_rank : {end} : self.util.world_size]; "
NO_ROWS = "self.rows or self.refuse('no rows', f'{self.path}:1')"
RAISE = "        raise DataError(what, where=where)\n"
REFUSE = "    def encode", f"    def refuse(self, what, where):\n{RAISE}\n    def encode"


def test_lost_rows_are_found_although_there_are_fewer_rows_than_ranks(make_trial):
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}]
    own_shards = make_trial(REFUSE, afterwards(SHARDS.format(end="") + NO_ROWS), rows=rows)
    DatasetContract().test_ranks(own_shards, 3)
    lost = SHARDS.format(end="-(len(self.rows) % self.util.world_size) or None")
    rows_lost = make_trial(REFUSE, afterwards(lost + NO_ROWS), rows=rows)
    assert "of 7 rows on 3 ranks 1 on no rank" in violation(rows_lost, "test_ranks", 3).finding


def test_a_refusal_has_its_location_in_the_dataset(make_trial):
    """Not in the file that the tests wrote for it, which is gone then."""
    trial = make_trial(REFUSE, afterwards("self.refuse('no such rows', f'{self.path}:1')"))
    with pytest.raises(Violation, match="no such rows") as caught:
        trial.demand()
    before, _, _ = inspect.getsource(inspect.getmodule(trial.cls)).partition(RAISE)
    assert caught.value.where.endswith(f"{trial.name}.py:{before.count(chr(10)) + 1}")


def test_a_dataset_without_len_or_index_is_reported_and_not_tested_further(make_trial):
    trial = make_trial(
        ("    def __len__", "    def count"), ("    def __getitem__", "    def item")
    )
    first, *others = run_checks([Subject("dataset", trial.name, trial.file)], Mock())[0].checks
    assert (first.words, first.failure.finding) == (
        "it can be built from its rows",
        "Tiny has no len() and no []",
    )
    assert "into a list" in first.failure.cause
    assert {check.reason for check in others} == {"not tried: it cannot be built"}


READ_FORWARD = """\
    def rows_from(self, epoch, start):
        return (self.item(index) for index in range(start, len(self.rows)))

    def item(self, index):
"""
STREAM = (
    ("    def __len__(self):\n        return len(self.rows)\n", ""),
    ("    def __getitem__(self, index):\n", READ_FORWARD),
    ("    def preview(", "    def shown("),
)


@pytest.mark.long
def test_a_stream_is_tested_on_its_first_rows(make_trial):
    trial = make_trial(*STREAM)
    checks = run_checks([Subject("dataset", trial.name, trial.file)], Mock())[0].checks
    assert [
        (check.words, check.failure.finding) for check in checks if check.failure is not None
    ] == []
    (continues,) = [
        check for check in checks if check.words.startswith("a stream continues from any place")
    ]
    assert continues.reason is None or "no stream" not in continues.reason


def test_what_only_numbered_rows_have_is_not_demanded_of_a_stream(tmp_path):
    """Its class has a preview and a survey, for when it is no stream."""
    trial = Trial("prompt_only", {"streaming": True}, tmp_path, byte_tokenizer())
    checks = DatasetContract()
    checks.test_texts_come_back(trial, chat=False)
    checks.test_skipped_rows(trial)
    assert as_read(trial.demand())["heavy"] == []
    for check in (checks.test_preview, checks.test_places, checks.test_survey):
        with pytest.raises(pytest.skip.Exception):
            check(trial)


def test_a_stream_that_continues_at_the_wrong_row_is_reported(make_trial):
    trial = make_trial(*STREAM, ("range(start, len", "range(start // 2, len"))
    assert violation(trial, "test_continues").finding.startswith("read from row 1 on, ")


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        (
            "prompt=question",
            "prompt='?!'",
            "the prompt is '.!', the tokens before the answer say 'What is",
        ),
        (
            "answers=[words]",
            "answers=['?!']",
            "the answer is '.!', the tokens that are trained on say '4'",
        ),
    ],
)
def test_texts_that_differ_from_the_tokens_are_reported(make_trial, old, new, finding):
    assert re.search(
        finding, violation(make_trial((old, new)), "test_texts_come_back", False).finding
    )


@pytest.mark.parametrize(
    "changed",
    ['"\\n".join(row["prompt"].splitlines())', 'row["prompt"].replace("%", "")'],
    ids=["lines", "signs"],
)
def test_a_text_that_is_changed_on_its_way_to_tokens_is_reported(make_trial, changed):
    trial = make_trial(('texts = row["prompt"]', f"texts = {changed}"))
    assert re.search(
        "of a row is not in its tokens",
        violation(trial, "test_texts_are_kept_as_written", False).finding,
    )


def test_a_dataset_of_a_user_may_strip_its_texts(make_trial):
    trial = make_trial(('texts = row["prompt"]', 'texts = row["prompt"].strip()'))
    DatasetContract().test_texts_are_kept_as_written(trial, False)


def test_a_system_prompt_that_is_ignored_is_reported(make_trial):
    argument = '    system: str | None = None\n    """System prompt."""\n'
    trial = make_trial(("    max_length: int = 100\n", f"{argument}    max_length: int = 100\n"))
    assert (
        "in the tokens of no row"
        in violation(trial, "test_the_system_prompt_is_used", True).finding
    )


def test_streaming_that_has_other_rows_than_the_file_is_reported(make_trial):
    argument = '    streaming: bool = False\n    """Read rows as they are needed."""\n'
    trial = make_trial(
        ("    max_length: int = 100\n", f"{argument}    max_length: int = 100\n"),
        (
            "    def __len__(self):\n",
            "    @property\n"
            "    def is_stream(self):\n"
            "        return self.streaming\n\n"
            "    def rows_from(self, epoch, start):\n"
            "        return iter([self[0] for _ in self.rows[start:]])\n\n"
            "    def __len__(self):\n",
        ),
    )
    assert violation(trial, "test_long_streams").finding.startswith(
        "with streaming, read from row 0 on, row 1"
    )


def test_a_dataset_without_a_preview_gets_a_tokenizer_of_transformers(make_trial):
    trial = make_trial(("    def preview", "    def glance"))
    assert type(trial.make().util.tokenizer).__module__.startswith("transformers")
    DatasetContract().test_special_tokens(trial, CHAT)
    DatasetContract().test_texts_come_back(trial, False)


def test_a_dataset_that_reads_a_file_must_have_an_example_row(make_trial):
    with pytest.raises(Violation, match="no rows to write into one") as caught:
        make_trial(("    EXAMPLES: ClassVar", "    LIKE: ClassVar"))
    assert "EXAMPLES" in caught.value.cause
    rows = [{"prompt": "a", "answer": "b"}]
    assert make_trial(("    EXAMPLES: ClassVar", "    LIKE: ClassVar"), rows=rows).rows == rows


FOREIGN_NAME = (
    ("    path: str", "    dataset_path: str"),
    ("open(self.path", "open(self.dataset_path"),
    ('f"{self.path}:', 'f"{self.dataset_path}:'),
)


def test_the_argument_of_a_file_may_have_its_name_in_other_frameworks(make_trial, tmp_path):
    trial = make_trial(*FOREIGN_NAME)
    assert (trial.file_argument, len(trial.make())) == ("dataset_path", 3)
    file = tmp_path / "given.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n')
    own_file = make_trial(*FOREIGN_NAME, args={"dataset_path": str(file)})
    assert own_file.rows == [{"prompt": "a", "answer": "b"}]
    with pytest.raises(Violation) as caught:
        make_trial(*FOREIGN_NAME, ("    EXAMPLES: ClassVar", "    LIKE: ClassVar"))
    assert "or give dataset_path=FILE" in caught.value.cause


def test_the_rows_of_a_given_file_are_tested(make_trial, tmp_path):
    file = tmp_path / "given.jsonl"
    file.write_text(
        '{"prompt": "a", "answer": "b"}\n\n{"prompt": "c"}\n{"prompt": "d", "answer": "e"}\n'
    )
    trial = make_trial(args={"path": str(file)})
    assert [row["prompt"] for row in trial.rows] == ["a", "d"]
    with pytest.raises(DataError) as caught:
        DatasetContract().test_own_file(trial)
    assert caught.value.where == f"{file}:3"


def test_rows_are_read_from_json_lines_and_lists(tmp_path):
    lines, listed, binary = (tmp_path / name for name in ("a.jsonl", "b.json", "c.csv"))
    lines.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(100)) + "broken\n[1]\n")
    listed.write_text(json.dumps([{"n": 1}, 2]))
    binary.write_bytes(b"\xff\xfe")
    assert [row["n"] for row in rows_in(lines)[:3]] == [0, 3, 6]
    assert len(rows_in(lines)) == 32
    assert (rows_in(listed), rows_in(binary), rows_in(tmp_path / "none")) == ([{"n": 1}], [], [])


@pytest.mark.parametrize("chat", [False, True])
def test_the_test_tokenizer_equals_its_transformers_version(chat):
    light = byte_tokenizer(chat=chat)
    full = as_transformers(light)
    text = "Ünï\n<bos> 72😀"
    assert light(text).input_ids == full(text).input_ids
    assert light.decode(light(text, add_special_tokens=False).input_ids) == text
    assert (light.bos_token_id, light.eos_token_id, len(light)) == (
        full.bos_token_id,
        full.eos_token_id,
        len(full),
    )
    if chat:
        words = {
            "conversation": [{"role": "user", "content": "hi"}],
            "tokenize": False,
            "add_generation_prompt": True,
        }
        assert (
            light.apply_chat_template(**words)
            == full.apply_chat_template(**words)
            == "<bos><user>hi<assistant>"
        )


# -- what SAMPLES states ---------------------------------------------------------------------------

KEYS = '    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")\n'


def stating(make_trial, *samples, **how):
    """The dataset that states these samples."""
    return make_trial((KEYS, f"{KEYS}    SAMPLES: ClassVar = {samples!r}\n"), **how)


@pytest.mark.parametrize(
    "samples",
    [
        [{"prompt": "What is 2+2?", "answers": ["4"]}],
        [{"answers": ["4"], "metadata": {}}, {"prompt": "A colour?"}],
        [{"prompt_mask": [True] * 13 + [False] * 2}],
    ],
)
def test_samples_are_as_they_are_stated(make_trial, samples):
    DatasetContract().test_examples_become_the_stated_samples(stating(make_trial, *samples))


@pytest.mark.parametrize(
    ("samples", "finding"),
    [
        ([{"prompt": "What?"}], "prompt of sample 1 is 'What is 2+2?', not 'What?' as stated"),
        ([{}, {"answers": ["red"]}], "answers of sample 2 is ['grün'], not ['red'] as stated"),
        ([{"metadata": {"a": 1}}], "a in the metadata of sample 1 is None, not 1 as stated"),
        ([{}] * 4, "EXAMPLES become 3 samples, SAMPLES states more"),
        ([{"response": "4"}], "SAMPLES states response"),
    ],
)
def test_another_sample_than_stated_is_reported(make_trial, samples, finding):
    reported = violation(stating(make_trial, *samples), "test_examples_become_the_stated_samples")
    assert reported.finding == finding


@pytest.mark.parametrize(
    "how", [{"args": {"max_length": 50}}, {"rows": [{"prompt": "", "answer": ""}]}]
)
def test_samples_are_stated_for_examples_and_default_arguments_only(make_trial, how):
    with pytest.raises(pytest.skip.Exception, match="with default arguments"):
        DatasetContract().test_examples_become_the_stated_samples(
            stating(make_trial, {"prompt": "Another"}, **how)
        )


def test_samples_that_are_inherited_are_not_stated_for_new_examples(make_trial, monkeypatch):
    trial = stating(make_trial, {"prompt": "Another"})
    derived = type("Derived", (trial.cls,), {"EXAMPLES": trial.cls.EXAMPLES})
    monkeypatch.setattr(trial, "cls", derived)
    with pytest.raises(pytest.skip.Exception, match="states no samples"):
        DatasetContract().test_examples_become_the_stated_samples(trial)
