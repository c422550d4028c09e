"""What vLLM omits when it reloads weights: a head that shares the matrix of the embeddings.

On a CPU its products are computed with a packed copy of that matrix, which a reload does not
renew, so a model would sample with the head that it was started with. This file is imported by
vLLM, in its environment, so it needs nothing but Python.
"""

from __future__ import annotations

from typing import Any


class TiedHead:
    """Becomes part of vLLM's workers (`--worker-extension-cls`)."""

    model_runner: Any

    def renew_tied_head(self) -> None:
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
        if model.config.tie_word_embeddings and head is not None and embeddings is not None:
            head.weight = embeddings.weight
            head.quant_method.process_weights_after_loading(head)
