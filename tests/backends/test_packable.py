"""Texts are refused whose numbers, or those of others, would depend on the rest of a pack."""

import pytest

from rlcli.errors import ModelError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.samples import batch, prompts
from rlcli.testing.tiny_models import tiny_model

LIMIT = 16
ROPES = {
    "dynamic": ({"factor": 2.0}, LIMIT),
    "longrope": ({"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
                  "original_max_position_embeddings": LIMIT}, 4 * LIMIT),
}  # fmt: skip
"""Settings, and the positions of the model."""


class Subject(BackendContract):
    name = "fsdp"


@pytest.mark.parametrize("kind", ROPES)
def test_texts_that_would_change_the_positions_of_others_are_refused(kind):
    settings, room = ROPES[kind]
    rope = {"rope_type": kind, "rope_theta": 1e4, **settings}
    lm = tiny_model("llama", max_position_embeddings=room, rope_parameters=rope)
    engine = Subject().engine(lm=lm)
    short = prompts(lengths=(4,))
    engine.forward(batch(lengths=((2, LIMIT - 2), (1, 3))))
    generate(engine, short, [0], max_new_tokens=LIMIT - 4)
    with pytest.raises(ModelError, match=f"beyond {LIMIT}, the {kind} position embeddings"):
        engine.forward(batch(lengths=((2, LIMIT - 1), (1, 3))))
    with pytest.raises(ModelError, match=f"may reach {LIMIT + 1} tokens"):
        generate(engine, short, [0], max_new_tokens=LIMIT - 3)
