"""What the numbers in a run's records mean. A component declares its own in `METRICS`; the others
are in `RUN_METRICS`.

In a name, `<…>` stands for one or more characters: `time/<call>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Metrics = Mapping[str, tuple[str, str]]
"""Name → (unit, meaning)."""

STEP_METRICS: Metrics = {
    "total/prompts": (
        "prompts",
        "rows of the dataset that the run has trained on, each with all its responses",
    ),
    "total/tokens": (
        "tokens",
        "tokens of the sequences that the run has trained on, prompts included",
    ),
    "used/<dataset>": (
        "prompts",
        "rows of one source of a mixed dataset that the run has trained on",
    ),
    "tokens_per_second": (
        "tokens per second",
        "tokens of the step's sequences, divided by the duration of the step",
    ),
    "time/step": ("seconds", "duration of the step, without evaluation and checkpoint"),
    "time/<call>": (
        "seconds",
        "computing time of the call on its slowest rank; for a call ahead of training, "
        "of several chunks",
    ),
    "time/<call>.copy_to": (
        "seconds",
        "time until the last rank that follows the call's role had the new weights",
    ),
    "bytes/<call>.copy_to": (
        "bytes",
        "sent between ranks to give the weights of the call's role to the role that follows it",
    ),
    "time/moves": ("seconds", "time of transfers of tensors between ranks"),
    "time/idle/<roles>": (
        "seconds",
        "time in which the ranks of these roles computed nothing, mean over the ranks",
    ),
    "time/idle_share/<roles>": ("share", "the same as a share of the step"),
    "time/checkpoint": (
        "seconds",
        "how long training waited for the last checkpoint before this step",
    ),
    "time/eval": ("seconds", "duration of the evaluation"),
    "restarts/<group>": (
        "processes",
        "processes of servers or pools that had ended and were started again",
    ),
}
"""The metrics of every step."""

PERFORMANCE_METRICS: Metrics = {
    "perf/<role>/tokens_per_second": (
        "tokens per second",
        "tokens of the sequences that the role's calls scored or trained on, and of the responses "
        "that they generated, divided by the time of these calls",
    ),
    "perf/<role>/flops": (
        "operations",
        "floating-point operations of the matrix products in the role's calls, over all ranks; "
        "activations that are recomputed are not counted",
    ),
    "perf/<role>/mfu": (
        "share",
        "the same as a share of what the devices could have computed in the time of these calls "
        "(log.peak_tflops, or measured in a profiled step)",
    ),
}
"""The metrics of roles that compute with tokens."""

DROP_METRICS: Metrics = {
    "samples/drawn": ("prompts", "prompts drawn for the step"),
    "samples/dropped": (
        "prompts",
        "prompts that calls dropped; ahead of training, since the step before",
    ),
    "samples/dropped/<reason>": ("prompts", "the same for one reason"),
    "samples/redrawn": ("prompts", "prompts drawn in place of dropped ones"),
    "samples/returned": ("prompts", "prompts that were left over: the next step begins with them"),
}
"""Where calls may drop samples."""

STALENESS_METRICS: Metrics = {
    "<role>/staleness": (
        "steps",
        "training steps by which the weights that generated lagged those trained, mean over "
        "the prompts. It reaches max_staleness and stays there, unless take_first is freshest",
    ),
    "staleness/min": ("steps", "staleness of the step's freshest sample"),
    "staleness/max": ("steps", "staleness of the step's oldest sample, at most max_staleness"),
    "staleness/share_<steps>": ("share", "share of the step's samples with this staleness"),
    "staleness/tokens_<steps>": (
        "share",
        "share of the tokens of the step's responses with this staleness, where weights change "
        "while responses are in progress",
    ),
    "segments/mean": ("segments", "segments of a response, each with weights of its own, mean"),
    "segments/max": ("segments", "segments of the response that has the most"),
    "samples/ahead": (
        "prompts",
        "prompts in progress or finished that no step has been trained on yet",
    ),
    "samples/running": ("prompts", "those of them in progress"),
    "samples/ready": ("prompts", "those of them that are finished and wait for a step"),
    "samples/expired": (
        "prompts",
        "prompts that became older than max_staleness and are generated again",
    ),
    "samples/retried": ("prompts", "prompts of the step that were generated more than once"),
    "queue/<call>": ("prompts", "prompts that wait for the call"),
    "eval/version": ("steps", "training steps behind the weights that were evaluated"),
}
"""Above max_staleness 0. For calls that run ahead, numbers cover all chunks up to the newest that
the step uses."""

SCORE_METRICS: Metrics = {
    "<role>/reward": ("reward", "mean reward of the responses, as the call gives it"),
    "<role>/accuracy": ("share", "share of responses that are right"),
}
"""The metrics of calls that give rewards."""

SERVER_METRICS: Metrics = {
    "<role>/servers/running": (
        "requests",
        "responses that a server works on, mean over its readings, which are 5 s apart",
    ),
    "<role>/servers/queued": ("requests", "requests that wait in a server, likewise"),
    "<role>/servers/cache_hits": (
        "share",
        "share of the tokens of prompts whose keys and values servers had in their caches",
    ),
    "<role>/servers/preemptions": (
        "preemptions per response",
        "how often servers interrupted a response for lack of cache",
    ),
}
"""The metrics of roles whose responses come from servers, where these report metrics."""

ENGINE_METRICS: Metrics = {
    "<role>/loss": ("loss", "loss, mean over the optimizer steps"),
    "<role>/loss_weight": (
        "tokens",
        "divisor of the loss, summed over the optimizer steps: what the loss counts, "
        "such as tokens, responses or pairs",
    ),
    "<role>/grad_norm": (
        "norm",
        "norm of the gradient before it is clipped, mean over the optimizer steps",
    ),
    "<role>/lr": ("rate", "learning rate"),
    "<role>/update_skipped": (
        "optimizer steps",
        "optimizer steps that did not change the weights: the gradient was not finite, "
        "an early_stop setting applied, or nothing was left to train on",
    ),
    "<role>/router_aux_loss": (
        "loss",
        "load-balancing loss of the routers, without its coefficient; experts per token "
        "if all experts are used equally",
    ),
    "<role>/router_z_loss": ("loss", "z-loss of the routers, without its coefficient"),
    "<role>/router_entropy": ("nats per token", "entropy of the routers' choice of an expert"),
    "<role>/router_load_max": (
        "ratio",
        "tokens of the busiest expert of any layer, divided by the mean of its layer",
    ),
    "<role>/router_load_min": ("ratio", "the same for the expert with the fewest tokens"),
    "<role>/router_dropped": ("share", "choices of experts that were not counted: always 0"),
}
"""The metrics of calls that train."""

EVAL_METRICS: Metrics = {
    "eval/reward": ("reward", "mean reward over the held-out prompts"),
    "eval/accuracy": ("share", "share of right responses, mean over the held-out prompts"),
    "eval/pass@<k>": ("share", "probability that at least one of k responses to a prompt is right"),
    "eval/majority@<n>": ("share", "share of prompts whose most frequent final answer is right"),
    "eval/response_length": ("tokens", "mean length of the responses"),
    "eval/no_eos_fraction": ("share", "share of responses that were cut off"),
    "eval/loss": ("loss", "loss on the held-out rows"),
}
"""The metrics of evaluations, which also report those of their calls."""

RUN_METRICS: Metrics = {
    **STEP_METRICS,
    **PERFORMANCE_METRICS,
    **DROP_METRICS,
    **STALENESS_METRICS,
    **SCORE_METRICS,
    **SERVER_METRICS,
    **ENGINE_METRICS,
    **EVAL_METRICS,
}
"""Every number that is not declared by a component."""


def declared_metrics(cls: type) -> dict[str, tuple[str, str]]:
    """What a component's class and its bases declare in `METRICS`."""
    declared: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        declared |= vars(base).get("METRICS", {})
    return declared


def metric_for(key: str, metrics: Iterable[str]) -> str | None:
    """The name among `metrics` that describes a key of the records; the most specific one."""
    fitting = [name for name in metrics if _pattern(name).fullmatch(key)]
    return max(fitting, key=lambda name: len(re.sub("<[^>]*>", "", name)), default=None)


def _pattern(name: str) -> re.Pattern[str]:
    literal = re.split("<[^>]*>", name)
    return re.compile(".+".join(map(re.escape, literal)))
