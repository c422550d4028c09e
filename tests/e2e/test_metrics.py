"""Every metric that a run of any algorithm writes is listed by `rlcli show metrics`, and every
listed metric is written."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from toy_project import RECIPE, make_project

from rlcli import registry
from rlcli.api.metrics import RUN_METRICS, metric_for
from rlcli.recipe.introspection.metrics import all_metrics

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

TINY_MODEL = (
    "{_replace_: true, model_type: llama, hidden_size: 32, intermediate_size: 32, "
    "num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 512, "
    "tie_word_embeddings: true}"
)
SMALL = (
    "models.actor.path=null",
    f"models.actor.scratch={TINY_MODEL}",
    "models.actor.tokenizer=builtin:arithmetic",
    "train.prompts_per_step=4",
    "train.steps=2",
    "log.plot=false",
    "log.trackers=[]",
)
ARITHMETIC = ("datasets.train.args.problems=8",)
EVALUATED = (*ARITHMETIC, "datasets.held_out.args.problems=2", "train.eval.every_steps=2")
SAMPLED = ("evaluation.generation.greedy=false", "evaluation.generation.responses_per_prompt=2")
GENERATED = (
    *EVALUATED,
    *SAMPLED,
    "generation.max_new_tokens=4",
    "generation.responses_per_prompt=4",
)
TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")
OWN_LOGPROBS = (
    "graph.own_inf={model: actor, call: inference, interface: {type: ppo_actor, args: '${ppo}'}, "
    "output_key_remap: {packed_logprobs: proximal_logprobs}}"
)


def reward(name, interface, **args):
    """An additional reward call whose rewards are used only for metrics."""
    described = json.dumps({"type": interface, "args": args})
    return (
        f"graph.{name}_inf={{model: reward, call: inference, interface: {described}, "
        f"output_key_remap: {{rewards: {name}}}}}"
    )


def recipes(judge):
    """Name of a run → its arguments. Together the runs write every metric."""
    rewards = (
        reward("timed", "function_reward", path="busy.py", cpu_s=0.2, max_error_fraction=1.0),
        reward(
            "judged",
            "llm_judge",
            url=judge,
            model="m",
            tries=1,
            pause_s=0.0,
            max_error_fraction=1.0,
        ),
        reward("liked", "hf_reward", path="classifier", max_length=4),
        (
            "graph.total_inf={model: reward, call: inference, interface: {type: weighted_sum, "
            "args: {weights: {timed: 1.0, judged: 0.1}}}, output_key_remap: {rewards: total}}"
        ),
    )
    dropping = "{_replace_: true, type: weighted_sum, args: {weights: {seq_no_eos_mask: -1.0}}}"
    return {
        "ppo": (
            "ppo_math",
            *SMALL,
            *GENERATED,
            *TWO_RANKS,
            "models.critic.devices=1",
            "models.ref.devices=1",
            "models.actor.rollout.devices=1",
            "models.actor.rollout.backend.args.dtype=float32",
            "ppo.recompute_logprob=true",
            OWN_LOGPROBS,
            "ppo.c_clip=3.0",
            "checkpoint.every_steps=1",
        ),
        "rewards": ("ppo_math", *SMALL, *GENERATED, *rewards),
        "stale": ("grpo_math", *SMALL, *GENERATED, "train.max_staleness=1", "log.profile=2"),
        "dapo": (
            "grpo_math",
            "--with",
            "dapo",
            *SMALL,
            *EVALUATED,
            "generation.responses_per_prompt=2",
            "generation.max_new_tokens=2",
            "train.prompts_per_draw=3",
            "grpo.overlong_buffer=null",
            f"generation.stop_token_ids={list(range(2, 380, 3))}",
            f"graph.reward_inf.interface={dropping}",
        ),
        "sft": (
            "sft_math",
            *SMALL,
            "datasets.long={type: arithmetic_demonstrations, args: {problems: 8}}",
            "datasets.short={type: arithmetic_demonstrations, args: {problems: 8, seed: 1}}",
            "datasets.train={_replace_: true, type: mixture, args: {weights: {long: 1, short: 1}}}",
            "train.eval.dataset=long",
        ),
        "reward_model": (
            "rm_arithmetic",
            *(line.replace("models.actor", "models.reward") for line in SMALL),
            *EVALUATED,
            "reward_model.pair_aggregation=prompt",
        ),
        "dpo": (
            "dpo_arithmetic",
            *SMALL,
            *EVALUATED,
            "dpo.nll_coef=0.1",
            "models.reward=null",
            "datasets.held_out.type=arithmetic_pairs",
            (
                "train.eval.graph={_replace_: true, eval_ref: '${graph.ref_inf}', eval_pairs: "
                "{model: actor, call: evaluate, interface: {type: dpo, args: '${dpo}'}}}"
            ),
        ),
        "kto": (
            "kto_arithmetic",
            *SMALL,
            *EVALUATED,
            "models.reward=null",
            "datasets.held_out.type=arithmetic_unpaired",
            (
                "train.eval.graph={_replace_: true, eval_mismatched: '${graph.mismatched}', "
                "eval_ref: '${graph.ref_inf}', eval_ref_mismatched: '${graph.ref_mismatched_inf}', "
                "eval_answers: {model: actor, call: evaluate, "
                "interface: {type: kto, args: '${kto}'}}}"
            ),
        ),
        "distill": (
            "distill_math",
            *SMALL,
            *GENERATED,
            "models.teacher.path=null",
            "models.teacher.init=actor",
        ),
        "episodes": ("grpo_guess", *SMALL, *EVALUATED),
        "best_of_n": (
            "best_of_n_math",
            *SMALL,
            *GENERATED,
            "graph.actor_train.interface.args={keep: best}",
        ),
    }


BUSY = """\
def score(response):
    while len(response) % 2:
        pass
    return 1.0 if len(response) % 4 else 1 / 0
"""


class Judge(BaseHTTPRequestHandler):
    """Scores the plain response, and about half of all others."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mark = re.search(
            r"^SCORE ([0-9a-f]{16}): <number>$", body["messages"][0]["content"], re.MULTILINE
        )[1]
        text = (
            body["messages"][1]["content"]
            .rpartition(f"[BEGIN {mark}]\n")[2]
            .partition(f"\n[END {mark}]")[0]
        )
        is_scored = text == "I do not know." or len(text) % 2
        reply = f"SCORE {mark}: 1" if is_scored else "no verdict"
        raw = json.dumps(
            {"choices": [{"message": {"role": "assistant", "content": reply}}]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a reward function and a reward classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("metrics")
    (folder / "busy.py").write_text(BUSY)
    tokenizer = registry.load("datasets", "arithmetic").make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=2,
        pad_token_id=0,
    )
    BertForSequenceClassification(config).save_pretrained(folder / "classifier")
    tokenizer.save_pretrained(folder / "classifier")
    return folder


@pytest.fixture(scope="module")
def run_metrics(home, judge, train_into):
    """Run → (the interfaces and renamed rewards of its recipe, the keys of its records)."""
    runs = {}
    for name, arguments in recipes(judge).items():
        run = train_into(home, *arguments, name=name)
        assert run.code == 0, f"{name}: {run.err}"
        runs[name] = metrics_of(run.folder)
    return runs


def metrics_of(folder):
    recipe = yaml.safe_load((folder / "recipe.resolved.yaml").read_text())
    calls = [*recipe["graph"].values(), *recipe["train"]["eval"].get("graph", {}).values()]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    renamed = {
        f"{call['model']}/{key}"
        for call in calls
        for key in call.get("output_key_remap", {}).values()
    }
    keys = {key for record in records for key in record} - {"step", "nonfinite"} - renamed
    return {call["interface"]["type"] for call in calls}, keys


OF_RARE_RESPONSES = {
    f"<role>/reward_{name}" for name in ("unparsed", "timeouts", "crashes", "errors")
}
"""Written by `math_reward` for responses that a tiny model does not give: see
tests/interfaces/test_math_*.py."""


OF_ROUTERS = {
    f"<role>/router_{name}"
    for name in ("aux_loss", "z_loss", "entropy", "load_max", "load_min", "dropped")
}
"""Written for mixtures of experts: see tests/backends/test_routers.py."""


OF_CHANGING_WEIGHTS = {"segments/mean", "segments/max", "staleness/tokens_<steps>"}
"""Written where weights change while responses are under way: see
tests/e2e/test_partial_rollouts.py."""


OF_SERVERS = {
    f"<role>/servers/{name}" for name in ("running", "queued", "cache_hits", "preemptions")
}
"""Written where responses come from servers: see tests/e2e/test_partial_rollouts.py."""


def test_every_written_metric_is_described(run_metrics):
    for name, (interfaces, keys) in run_metrics.items():
        described = [
            metric.name
            for metric in all_metrics()
            if not metric.interfaces or {*metric.interfaces} & interfaces
        ]
        assert {key for key in keys if metric_for(key, described) is None} == set(), name


def test_every_described_metric_is_written_by_a_run(run_metrics, restart_metrics):
    keys = {key for _, keys_of_run in run_metrics.values() for key in keys_of_run} | restart_metrics
    interfaces = {
        path.stem for path in Path(registry.__file__).parents[2].glob("interfaces/**/*.py")
    }
    described = [
        metric.name
        for metric in all_metrics()
        if not metric.interfaces or {*metric.interfaces} & interfaces
    ]
    unwritten = {name for name in described if all(metric_for(key, [name]) is None for key in keys)}
    assert unwritten <= (OF_RARE_RESPONSES | OF_ROUTERS | OF_CHANGING_WEIGHTS | OF_SERVERS)


@pytest.fixture(scope="module")
def restart_metrics(tmp_path_factory, warm_command):
    """The keys of a run in which a process of a pool is killed."""
    project = make_project(tmp_path_factory.mktemp("restarts"))
    (project / "toy.yaml").write_text(RECIPE)
    trouble = "graph.score.interface={type: toy_trouble, args: {kind: 'kill -9'}}"
    done = warm_command(
        "train",
        "toy.yaml",
        trouble,
        "models.reward.backend=cpu_pool",
        "--run-dir",
        "run",
        cwd=project,
    )
    assert done.returncode == 0, done.stderr
    records = [
        json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()
    ]
    return {key for record in records for key in record if metric_for(key, RUN_METRICS)}
