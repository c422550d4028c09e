"""No text is read as containing a special token, however it is spelt."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlcli.api.special_tokens import as_content, tokens_of, unmarked
from rlcli.checkpoint.light_tokenizer import LightTokenizer

NAMES = ("<EOS>", "<|im_end|>", "<im start>")
SPELLINGS = [
    "<EOS>",
    "<eos>",
    "\uff1cEOS\uff1e",
    "<|IM_END|>",
    "<im_start>",
    "<E\u0301OS>",
    "a <eos><eos> b",
    "<e<eos>os>",
]
NORMALIZERS = {
    "none": None,
    "lower case": normalizers.Lowercase(),
    "compatible": normalizers.NFKC(),
    "no accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "spaces": normalizers.Replace("_", " "),
}


def tokenizer_with(normalizer, is_light):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(name, normalized=True, special=True) for name in NAMES])
    return (
        LightTokenizer(backend, {})
        if is_light
        else PreTrainedTokenizerFast(tokenizer_object=backend)
    )


@pytest.mark.parametrize("is_light", [True, False])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_text_contains_no_special_token_in_any_spelling(normalizer, is_light):
    tokenizer = tokenizer_with(NORMALIZERS[normalizer], is_light)
    special = {tokenizer.convert_tokens_to_ids(name) for name in NAMES}
    plain = {id_ for ids in tokenizer(SPELLINGS, add_special_tokens=False).input_ids for id_ in ids}
    assert plain & special, "the test would prove nothing"
    for text in SPELLINGS:
        content = as_content(tokenizer, text)
        assert special.isdisjoint(tokens_of(tokenizer, [content])[0]), text
        assert unmarked(content) == text
