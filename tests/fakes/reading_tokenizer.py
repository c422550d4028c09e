"""A tokenizer for texts that come between turns."""

from types import SimpleNamespace

from rlcli.testing.tiny_models import TinyTokenizer


class ReadingTokenizer(TinyTokenizer):
    """Reads several texts at once, as transformers' tokenizers do."""

    def __call__(self, texts, add_special_tokens=True):
        return SimpleNamespace(input_ids=[self.encode(text) for text in texts])
