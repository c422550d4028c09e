"""vLLM's side of a row of `next_to_peers.py`, in a Python that has vLLM: each line on its standard
input starts a step, whose figures it prints as a line of JSON.

    python tests/bench/vllm_decoding.py MODEL DTYPE PROMPTS GROUP NEW_TOKENS CHECKED_TOKENS

PROMPTS is a file of JSON: a list of token ids for each prompt.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPORTS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints too
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # processor seconds are those of this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams  # noqa: E402


def main(
    model: str, dtype: str, prompts: str, group: str, new_tokens: str, checked_tokens: str
) -> None:
    # a prompt that is read in two parts fails with a seed of its own on a CPU
    llm = LLM(model, dtype=dtype, max_model_len=1024, max_num_batched_tokens=1 << 14)
    asked = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]

    def generate(**settings: float) -> list[list[int]]:
        outputs = llm.generate(asked, SamplingParams(**settings), use_tqdm=False)
        return [list(each.token_ids) for output in outputs for each in output.outputs]

    checked = generate(temperature=0.0, max_tokens=int(checked_tokens))
    now = clock()
    for number, _ in enumerate(sys.stdin):
        began = now()
        responses = generate(temperature=1.0, n=int(group), max_tokens=int(new_tokens), seed=number)
        report(checked, (now() - began) / sum(map(len, responses)))


def clock() -> Callable[[], float]:
    """Of this process; of the wall with several threads, whose waiting takes processor time too."""
    return time.process_time if os.environ["OMP_NUM_THREADS"] == "1" else time.perf_counter


def report(checked: list[list[int]], seconds: float) -> None:
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"computed": checked, "seconds": seconds, "mib": mib}
    print(json.dumps(figures), file=REPORTS, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
