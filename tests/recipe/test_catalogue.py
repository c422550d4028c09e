"""Every class of bad recipe: its id, its place and exit code 2,
in one message and without a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hint_following import problems, still_wrong

from rlcli.cli.main import main
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.resolve import load_recipe

TOP = "extends: small\n"

PROMPTS = """\
models: {heavy: {path: model}}
datasets: {prompts: {type: math_prompts, args: {path: rows.jsonl, max_length: 100}}}
graph:
  gen: {model: heavy, call: generate, interface: ppo_actor, inputs: [packed_prompts],
        outputs: [packed_input_ids]}
  look: {model: heavy, call: inference, interface: reference, inputs: [packed_input_ids],
         outputs: [packed_ref_logprobs]}
train: {dataset: prompts, steps: 3, prompts_per_step: 4}
"""

BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(10))

SCORES = (
    "model: actor, call: inference, interface: reference, inputs: [packed_input_ids], "
    "outputs: [packed_ref_logprobs]"
)
LOOP = (
    "graph: {loop: "
    f"{{{SCORES.replace('[packed_input_ids]', '[packed_input_ids, packed_ref_logprobs]')}}}}}\n"
)

BLOCKS = "".join(f"b{n}: {{a: 1}}\n" for n in (5, 3, 1, 4, 2))
BLOCKS += "name: 'r${b5.a}${b3.a}${b1.a}${b4.a}${b2.a}'\n"

LONG = 10_000
"""Characters of recipes that are refused for their size, and have no hint to follow."""

CASES = [
    # id, recipe, place, what the hint or the message must name
    ("R02", "- a\n", "bad.yaml:1:1", "a list"),
    ("R02", "text\n", "bad.yaml:1:1", "text"),
    ("R03", "a: 1\n---\nb: 2\n", "bad.yaml:2:1", "second document"),
    ("R05", TOP + "train:\n  steps: 3\n  steps: 4\n", "bad.yaml:4:3", "line 3"),
    ("R05", TOP + "seed: 2\ntrain: &a {steps: 3}\nlog:\n  <<: *a\n", "bad.yaml:5:3", "extends"),
    ("R06", TOP + "train:\n\tsteps: 3\n", "bad.yaml:3:1", "use spaces"),
    ("R07", TOP + "train: steps: 3\n", "bad.yaml:2:13", "not YAML"),
    ("R07", TOP + "log: {dir: [a,\n", "bad.yaml:2:12", "never closed"),
    ("R07", TOP + "log: {dir:a,tensorboard:b}\n", "bad.yaml:2:7",
     "dir:a has no space after its colon"),
    ("R07", TOP + "name: 'x\n", "bad.yaml:2:7", "not YAML"),
    ("R07", TOP + "seed: *gone\n", "bad.yaml:2:7", "no anchor"),
    ("R07", TOP + "log: {dir: ${seed}}\n", "bad.yaml:2:12", "quote it"),
    ("R08", TOP + "seed: !!python/object/apply:os.system [touch gone]\n", "bad.yaml:2:7", "tags"),
    ("R10", BOMB, "bad.yaml:5:", "values"),
    ("R11", TOP + "log: &a [*a]\n", "bad.yaml:2:10", "itself"),
    ("R14", "a: " + "[" * 20_000, "bad.yaml:1:35", "32"),
    ("R15", "a: " + "[" * 200_000, "bad.yaml:1:35", "32"),
    ("R16", "a: 1\n" * 300_000, "", "1 MiB"),
    ("R18", TOP.encode() + b"name: caf\xe9\n", "bad.yaml:2:10", "0xe9"),
    ("R19", TOP.encode("utf-16"), "", "UTF-16"),
    ("R21", TOP + "name: a\x07b\n", "bad.yaml:2:8", "U+0007"),
    ("R21", TOP + "name: a\x00b\n", "bad.yaml:2:8", "U+0000"),
    ("R21", TOP + "name: a\x85b\n", "bad.yaml:2:8", "U+0085"),
    ("R22", TOP + "se\u200bed: 1\n", "bad.yaml:2:1", "U+200B"),
    ("R22", TOP + "se\u00a0ed: 1\n", "bad.yaml:2:1", "U+00A0"),
    ("R22", TOP + "log: {dir: 'a\u202eb'}\n", "bad.yaml:2:14", "U+202E"),
    ("R23", TOP + "learning_r\u0430te: 1\n", "bad.yaml:2:1", "U+0430"),
    ("R29", TOP + "log: {plot: yes}\n", "bad.yaml:2:13", "true and false"),
    ("R31", TOP + "seed: 12:30:45\n", "bad.yaml:2:7", "12:30:45"),
    ("R32", TOP + "seed: 2026-13-45\n", "bad.yaml:2:7", "2026-13-45"),
    ("R34", TOP + "launch: {step_deadline: .inf}\n", "bad.yaml:2:25", "finite"),
    ("R34", TOP + "launch: {step_deadline: 1.0e+400}\n", "bad.yaml:2:25", "finite"),
    ("R35", TOP + "seed: " + "9" * 4301 + "\n", "bad.yaml:2:7", "out of range"),
    ("R35", TOP + "train: {steps: 0}\n", "bad.yaml:2:16", "at least 1"),
    ("R37", TOP + "train: {steps: true}\n", "bad.yaml:2:16", "must be int, found bool"),
    ("R37", TOP + "train: {steps: 1_000}\n", "bad.yaml:2:16", "write 1000"),
    ("R37", TOP + "train: {steps: '1,000'}\n", "bad.yaml:2:16", "write 1000 without quotes"),
    ("R37", TOP + "train: {steps: 007}\n", "bad.yaml:2:16", "write 7"),
    ("R37", TOP + "log: {trackers: none}\n", "bad.yaml:2:17", "write []"),
    ("R37", TOP + "log: {trackers: wandb}\n", "bad.yaml:2:17", "write [wandb]"),
    ("R37", TOP + "train: {shuffle: 'true'}\n", "bad.yaml:2:18", "write true without quotes"),
    ("R37", TOP + "launch: {step_deadline: '1e2'}\n", "bad.yaml:2:25", "write 1e2 without quotes"),
    ("R37", TOP + "launch: {step_deadline: '0,5'}\n", "bad.yaml:2:25", "write 0.5 without quotes"),
    ("R37", TOP + "launch: locla\n", "bad.yaml:2:9", "did you mean local?"),
    ("R37", TOP + "models: {actor: {scratch: 3}}\n", "bad.yaml:2:27", "a mapping"),
    ("R39", TOP + "train: {prompts_per_step: ~}\n", "bad.yaml:2:27", "required"),
    ("R40", TOP + "train: {prompts_per_step: }\n", "bad.yaml:2:27",
     "the value is empty; write null"),
    ("R40", TOP + "train:\n  prompts_per_step:\n", "bad.yaml:3:20", "the value is empty"),
    ("R39", TOP + "train: {_replace_: true, steps: 1}\n", "bad.yaml:2:8",
     "prompts_per_step is required"),
    ("R41", TOP + "log: {1: x}\n", "bad.yaml:2:7", "quote it"),
    ("R41", TOP + "log: {true: x}\n", "bad.yaml:2:7", "text"),
    ("R41", TOP + "log: {[1, 2]: x}\n", "bad.yaml:2:7", "a list"),
    ("R37", TOP + "models: {actor: {backend: {args: {schedule: cosin}}}}\n", "bad.yaml:2:",
     "did you mean cosine?"),
    ("R37", TOP + "models: {actor: {backend: {args: {dtype: fp16}}}}\n", "bad.yaml:2:",
     "'float32' or 'bfloat16'"),
    ("R37", TOP + "cluster: {device: gpu}\n", "bad.yaml:2:19", "did you mean cuda?"),
    ("R37", TOP + "train: {steps: '${log}'}\nlog: {plot: false}\n", "bad.yaml:2:16",
     "train.steps must be int, found a mapping, which it takes from log (bad.yaml:3:6)"),
    ("R37", TOP + "length: long\ntrain: {steps: '${length}'}\n", "bad.yaml:3:16",
     "train.steps must be int, found text 'long', which it takes from length (bad.yaml:2:9)"),
    ("R42", TOP + "models: {actor: {scratch: {hiden_size: 64}}}\n", "bad.yaml:2:28",
     "did you mean hidden_size?"),
    ("R37", TOP + "models: {actor: {scratch: {hidden_size: banana}}}\n", "bad.yaml:2:41",
     "must be int"),
    ("R49", TOP + "models: {actor: {scratch: {num_attention_heads: 3}}}\n", "bad.yaml:2:49",
     "must be a multiple of"),
    ("R70", TOP + "models: {actor: {scratch: {model_type: lama}}}\n", "bad.yaml:2:40",
     "did you mean llama?"),
    ("R42", "extends: ppo_math\nppo: {mini_batch_size: 4}\n", "bad.yaml:2:7",
     "ppo.minibatches in rlcli, the number of parts"),
    ("R71", "extends: sft_math\ngraph: {sft_train: {model: actr}}\n", "bad.yaml:2:28",
     "did you mean actor?"),
    ("R42", TOP + "train: {stepz: 3}\n", "bad.yaml:2:9", "did you mean steps?"),
    ("R42", TOP + "train: {zzz: 3}\n", "bad.yaml:2:9", "valid here: steps"),
    ("R42", TOP + BLOCKS + "zzz: 3\n", "bad.yaml:8:1", "checkpoint, log, b1, b2, b3, b4, b5"),
    ("R42", TOP + "learning_rate: 1e-4\n", "bad.yaml:2:1", "models.actor.backend.args.lr"),
    ("R43", TOP + "seed: 1\nmax_new_tokens: 5\n", "bad.yaml:3:1", "generation.max_new_tokens"),
    ("R43", TOP + "train: {STEPS: 5}\n", "bad.yaml:2:9", "steps"),
    ("R45", TOP + "models: {actor: {scratch: null, path: 'recipe:small'}}\n", "bad.yaml:2:39",
     "recipe:<name"),
    ("R47", TOP + "train: {epochs: 2}\n", "bad.yaml:2:17", "small.yaml:14:10"),
    ("R47", TOP + "train: {epochs: 2}\n", "bad.yaml:2:17", "train.steps=null removes that one"),
    ("R47", TOP + "models: {actor: {scratch: null, init: actor}}\n", "bad.yaml:2:39",
     "actor → actor"),
    ("R47", TOP + "models: {actor: {path: owner/name}}\n", "small.yaml:3:5", "bad.yaml:2:24"),
    ("R47", TOP + "models: {actor: {path: owner/name}}\n", "small.yaml:3:5",
     "to keep path: models.actor.scratch=null"),
    ("R49", TOP + "launch: local\ncluster: {devices_per_node: 8}\n", "small.yaml:15:21",
     "at least 8"),
    ("R49", TOP + "cluster: {devices_per_node: 2}\n", "bad.yaml:2:29", "launch=local"),
    ("R49", TOP + "models: {actor: {mesh: {tp: 2}}}\n", "bad.yaml:2:18",
     "= 2) does not fit its 1 device"),
    ("R49",
     TOP + "launch: local\ncluster: {devices_per_node: 4}\nmodels: {actor: {mesh: {tp: 3}}}\n",
     "bad.yaml:4:18", "mesh.tp=2, or models.actor.mesh.tp=4"),
    ("R49",
     TOP + "launch: local\ncluster: {devices_per_node: 4}\nmodels: {actor: {mesh: {dp: 3}}}\n",
     "bad.yaml:4:18", "use models.actor.mesh.dp=4"),
    ("R49",
     TOP + "launch: local\ncluster: {devices_per_node: 2}\nmodels: {actor: {mesh: {pp: 2}}}\n",
     "bad.yaml:4:29", "fsdp of actor does not support pp (models.actor.mesh.pp=2)"),
    ("R49", TOP + "cluster: {device: cpu}\nmodels: {actor: {backend: megatron}}\n",
     "bad.yaml:2:19", "megatron of actor runs on cuda only, not on cpu"),
    ("R49", "extends: ppo_math\nppo: {minibatches: 65}\n", "bad.yaml:2:20",
     "at most 64, or train.prompts_per_step of at least 65"),
    ("R49", PROMPTS, "bad.yaml:2:79", "at most 156"),
    ("R49", PROMPTS + "generation: {max_new_tokens: 157}\n", "bad.yaml:9:30", "at most 156"),
    ("R49",
     PROMPTS.replace("4}", "4, max_tokens_per_microbatch: 99}")
     + "generation: {max_new_tokens: 100}\n",
     "bad.yaml:8:85", "use at least 200"),
    ("R49", TOP + "generation: {top_p: 1.5}\n", "bad.yaml:2:21", "(0, 1]"),
    ("R50", TOP + "models: {actor: {devices: 0-1}}\n", "bad.yaml:2:27", "1 device"),
    ("R51", "extends: gone\n", "bad.yaml:1:10", "bad.yaml → gone"),
    ("R52", "extends: bad\n", "bad.yaml:1:10", "bad.yaml → bad.yaml"),
    ("R55", "extends: /etc/passwd\n", "bad.yaml:1:10", "in the recipe's folder"),
    ("R55", "extends: ../x\n", "bad.yaml:1:10", "in the recipe's folder"),
    ("R55", "extends: ~/x\n", "bad.yaml:1:10", "in the recipe's folder"),
    ("R55", "extends: file:///x\n", "bad.yaml:1:10", "relative path"),
    ("R55", "extends: https://x.org/y.yaml\n", "bad.yaml:1:10", "relative path"),
    ("R61", TOP + "seed: ${train.stepz}\n", "bad.yaml:2:7", "did you mean steps?"),
    ("R62", TOP + "log: {dir: '${env:RLCLI_TEST_UNSET}'}\n", "bad.yaml:2:12", "RLCLI_TEST_UNSET"),
    ("R62", TOP + "log: {dir: '${env:RLCLI_TEST_EMPTY}'}\n", "bad.yaml:2:12", "is empty"),
    ("R62", TOP + "log: {dir: '${env:MY_API_TOKEN}'}\n", "bad.yaml:2:12", "secret"),
    ("R62", TOP + "log: {dir: '${env:DB_PASS}'}\n", "bad.yaml:2:12", "secret"),
    ("R63", TOP + "log: {dir: '${env:HOME:-${x}}'}\n", "bad.yaml:2:12", "nesting"),
    ("R63", TOP + "log: {dir: '${env:HOME:-x}'}\n", "bad.yaml:2:12", "defaults"),
    ("R64", TOP + "a: ${b}\nb: ${a}\nseed: ${a}\n", "bad.yaml:", "circular"),
    ("R65",
     TOP + "".join(f"x{i}: '${{x{i - 1}}}${{x{i - 1}}}'\n" for i in range(1, 30))
     + "x0: xx\nname: ${x29}\n",
     "bad.yaml:", "64 KiB"),
    ("R68", TOP + "name: ../x\n", "bad.yaml:2:7", "up to 64"),
    ("R68", TOP + "name: -rf\n", "bad.yaml:2:7", "letters"),
    ("R68", TOP + f"name: {'x' * 300}\n", "bad.yaml:2:7", "64"),
    ("R68", TOP + "name: 🎉\n", "bad.yaml:2:7", "letters"),
    ("R68", TOP + "datasets: {a/b: arithmetic}\n", "bad.yaml:2:12", "letters"),
    ("R68", TOP + "datasets: {a.b: arithmetic}\n", "bad.yaml:2:12", "invalid name 'a.b'"),
    ("R68", TOP + "log: {dir: ../../x}\n", "bad.yaml:2:12", "not a folder for runs"),
    ("R69", TOP + "log: {dir: rows.jsonl/runs}\n", "bad.yaml:2:12", "below a file"),
    ("R69",
     TOP + "models: {heavy: {path: model}, b: {init: heavy}}\n"
           "graph: {look: {model: b, call: inference, interface: reference, "
           "inputs: [packed_input_ids], outputs: [packed_ref_logprobs]}}\nlog: {dir: model/runs}\n",
     "bad.yaml:4:12", "only read"),
    ("R70", TOP + "datasets: {train: arithmatic}\n", "bad.yaml:2:19", "did you mean 'arithmetic'"),
    ("R70", TOP + "models: {actor: {backend: os.system}}\n", "bad.yaml:2:27", "fsdp"),
    ("R70", TOP + "graph: {sft_train: {interface: ../x.py}}\n", "bad.yaml:2:32", "ppo_actor"),
    ("R71", TOP + "graph: {sft_train: {inputs: [packed_input_idz, prompt_mask]}}\n",
     "bad.yaml:2:30", "mean packed_input_ids?"),
    ("R71", TOP + "graph: {sft_train: {model: aktor}}\n", "bad.yaml:2:28", "did you mean actor?"),
    ("R71", TOP + "graph: {sft_train: {call: generate}}\n", "bad.yaml:2:27", "has no generate"),
    ("R71", TOP + LOOP, "bad.yaml:2:9", "loop → loop"),
    ("R71", TOP + "graph: {sft_train: {outputs: [prompt_mask]}}\n", "bad.yaml:2:31",
     "returns numbers"),
    ("R71", TOP + "graph: {sft_train: {inputs: [packed_input_ids]}}\n", "bad.yaml:2:29",
     "lacks the input prompt_mask"),
    ("R71", TOP + "graph: {sft_train: {inputs: [packed_input_ids, prompt_mask, prompt_mask]}}\n",
     "bad.yaml:2:61", "twice"),
    ("R71", TOP + "graph: {sft_train: {input_key_remap: {gone: x}}}\n", "bad.yaml:2:45",
     "does not list"),
    ("R71", TOP + f"graph: {{twin: {{{SCORES}}}, more: {{{SCORES}}}}}\n",
     "bad.yaml:2:228", "both twin and more produce packed_ref_logprobs"),
    ("R71", TOP + "models: {spare: {init: actor}}\n", "bad.yaml:2:10", "no call uses"),
    ("R71", TOP + "models: {actor: {backend: inference}}\n", "bad.yaml:2:27", "cannot train"),
    ("R71",
     TOP + "models: {actor: {head: value}}\n"
           "graph: {g: {model: actor, call: generate, interface: ppo_actor, "
           "input_key_remap: {packed_input_ids: packed_prompts}, outputs: [seq_no_eos_mask]}}\n",
     "bad.yaml:2:24", "head lm"),
    ("R71", TOP + "checkpoint: {keep_best: 1}\n", "bad.yaml:2:25", "nothing is evaluated"),
    ("R74", TOP + "log: {dir: \"\\e[31m{{7*7}}\"}\nseed: x\n", "bad.yaml:3:7", "int"),
]  # fmt: skip
ACCEPTED_BUT_WRONG_TYPE = {"R29": "R37", "R31": "R37", "R32": "R37", "R15": "R14", "R74": "R37"}
"""Rows in which such a value is text (or, for R15, the same refusal), where text is not allowed."""


@pytest.fixture
def command(folder: Path, monkeypatch, capsys):
    """Run `rlcli validate` in a folder with a small recipe, a model folder and rows;
    (exit code, stderr)."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 256})
    )
    (folder / "rows.jsonl").write_text("")
    monkeypatch.setenv("RLCLI_TEST_EMPTY", "")
    monkeypatch.setenv("MY_API_TOKEN", "canary")
    monkeypatch.delenv("RLCLI_TEST_UNSET", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["validate", *arguments])
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("code", "recipe", "location", "named"),
    CASES,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)],
)
def test_a_bad_recipe_is_refused_with_id_location_and_exit_code_2(
    command, folder: Path, code, recipe, location, named
):
    (folder / "bad.yaml").write_bytes(
        recipe if isinstance(recipe, bytes) else recipe.encode("utf-8", "surrogatepass")
    )
    before = sorted(os.listdir(folder))
    exit_code, output = command("bad.yaml")
    assert exit_code == 2, output
    lines = [line for line in output.splitlines() if line.startswith("error[")]
    shown = f"error[{ACCEPTED_BUT_WRONG_TYPE.get(code, code)}]"
    assert [line.partition("]")[0] + "]" for line in lines] == [shown], output
    where = lines[0].removeprefix(shown).strip()
    assert where.startswith(location) or (not location and where.startswith(":")), output
    assert named in output
    assert "Traceback" not in output
    assert "canary" not in output
    assert "\x1b" not in output
    assert sorted(os.listdir(folder)) == before


@pytest.mark.usefixtures("command")
def test_the_hints_of_bad_recipes_work(folder: Path):
    followed = 0
    for _, recipe, _, _ in CASES:
        if isinstance(recipe, str) and len(recipe) < LONG:
            (folder / "bad.yaml").write_text(recipe, encoding="utf-8", errors="surrogatepass")
            for hint in (problem.hint or "" for problem in problems("bad.yaml")):
                assert still_wrong("bad.yaml", [], hint) == [], (recipe, hint)
                followed += "=" in hint
    assert followed > 10


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("models:\n" + "".join(f"  m{i}: {{z{i}: 1}}\n" for i in range(2000)), "R35"),
        ("".join(f"learning_rate{i}: 1\n" for i in range(4000)), "R42"),
        ("log: {" + ", ".join(f"z{i}: 1" for i in range(4000)) + "}\n", "R42"),
        (
            "datasets: {train: {args: {" + ", ".join(f"z{i}: 1" for i in range(4000)) + "}}}\n",
            "R42",
        ),
    ],
)
def test_thousands_of_mistakes_are_refused_with_a_limited_report(command, folder: Path, text, code):
    (folder / "bad.yaml").write_text(TOP + text)
    exit_code, output = command("bad.yaml")
    assert exit_code == 2
    assert f"error[{code}] bad.yaml:2" in output
    assert output.count("error[") <= 41


@pytest.mark.parametrize("count", [2, 5])
def test_circular_layers_are_one_problem(command, folder: Path, count):
    for number in range(count):
        (folder / f"c{number}.yaml").write_text(f"extends: c{(number + 1) % count}\n")
    exit_code, output = command("c0.yaml")
    assert exit_code == 2
    assert output.count("error[R52]") == output.count("error[") == 1


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("x" * 300, "R59"),
        ("y/" * 2500, "R59"),
        ("fifo.yaml", "R57"),
        ("nowhere", "R51"),
        ("", "R59"),
    ],
)
def test_files_that_are_not_recipes_are_refused(command, folder: Path, name, code):
    os.mkfifo(folder / "fifo.yaml")
    for arguments in ((name,), ("small.yaml", f"--with={name}")):
        exit_code, output = command(*arguments)
        assert exit_code == 2
        assert f"error[{code}]" in output
        assert len(output) < 1500


@pytest.mark.parametrize(
    "value", ["on", "off", "yes", "no", "NO", "12:30:45", "1:30", "2026-01-01", "1.10", "007"]
)
def test_values_that_other_yaml_readers_convert_are_text(command, value):
    assert command("small.yaml", f"log.dir={value}")[0] == 0


@pytest.mark.parametrize("value", ["+1", "1.", ".5", "5.", "1e3", "1E+3"])
def test_every_notation_of_a_number_is_accepted(command, value):
    assert command("small.yaml", f"launch.step_deadline={value}")[0] == 0


@pytest.mark.parametrize(
    "text",
    ["🎉 漢字 é", "{{7*7}}", "{0.__class__}", "%s%n", "<b>", "'; DROP", "a  b", "#x", "a: b"],
)
def test_free_text_is_kept_unchanged(folder: Path, text):
    (folder / "free.yaml").write_text(TOP + to_yaml({"log": {"dir": text}}))
    assert load_recipe("free.yaml").recipe.log.dir == text
    assert (
        load_recipe(
            "small.yaml", [f"log.dir={json.dumps(text, ensure_ascii=False)}"]
        ).recipe.log.dir
        == text
    )
