"""A process that tries a tokenizer.json on a few texts. Started by `tokenizer_limits`, as a script.

The file is third-party data with rules to replace and to split text, by regular expressions too.
Some of them take forever, or fill the memory; the limits of a process end that. Time is processor
time, so that the outcome does not depend on the load of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import string
import sys
from collections.abc import Iterator
from typing import Any

from rlcli.processes import isolate

MEMORY_BYTES = 4 << 30
LONGEST_RULE = 64
"""Characters of a text in the file's rules that is tried as a text."""
REPEATED = 48
PER_CHARACTER = 64
"""Tokens, or characters of a decoded token, above which a text has exploded."""
RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    task = json.loads(sys.stdin.buffer.readline())
    signal.setitimer(signal.ITIMER_PROF, task["limit_s"])
    replies.write(json.dumps({"fault": fault_of(task["file"])}) + "\n")
    replies.flush()


def fault_of(file: str) -> str | None:
    """What is wrong with the tokens that the file gives; None also for a file that is not a
    tokenizer: reading it again says why."""
    from tokenizers import Tokenizer

    try:
        with open(file, "rb") as opened:
            content = opened.read()
        described = json.loads(content)
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except MemoryError:
        return f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"
    except Exception:  # tokenizers raises Exception itself
        return None
    for text in texts(described):
        try:
            ids = tokenizer.encode(text).ids
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
        except Exception:  # a text of which it knows no token
            continue
        most = PER_CHARACTER * (len(text) + 1)
        if len(ids) > most:
            return f"it makes {len(ids):,} tokens of {len(text)} characters"
        if len(decoded) > PER_CHARACTER * (most + len(text)):
            return f"it writes {len(decoded):,} characters for {len(ids)} tokens"
    return None


def texts(described: dict[str, Any]) -> Iterator[str]:
    """Runs of each common character, with an end that fits nothing,
    and the texts in the rules, also repeated."""
    yield from (
        character * REPEATED + "\x01!" for character in (*string.printable, "é", "中", "😀", "▁")
    )
    yield string.printable * 4
    for rule in RULES:
        for text in leaves(described.get(rule)):
            yield text[:LONGEST_RULE]
            yield text[:LONGEST_RULE] * REPEATED + "\x01!"


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    for child in children:
        yield from leaves(child)


if __name__ == "__main__":
    isolate(parent=int(sys.argv[1]), memory_bytes=MEMORY_BYTES)
    main()
