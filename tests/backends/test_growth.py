"""How computation and memory grow with tokens, sequences and responses: counted, not timed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.testing.backend import BackendContract
from rlcli.testing.tiny_models import VOCABULARY, TinyTokenizer


class Subject(BackendContract):
    name = "fsdp"


class CreatedTensors(TorchDispatchMode):
    """Counts the floating-point tensors that operations create, and their bytes; views are none."""

    def __init__(self):
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        output = operation(*arguments, **(keywords or {}))
        if all(each.alias_info is None for each in operation._schema.returns):
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    self.count += 1
                    self.bytes += tensor.nbytes
        return output


def drawn(generator, *shape):
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def apart(sequences, length):
    """Sequences that share nothing."""
    stream = torch.Generator().manual_seed(0)
    texts = drawn(stream, sequences, length)
    texts[:, 0] = torch.arange(sequences) % (VOCABULARY - 3) + 3
    return [[text] for text in texts]


def group(responses, prompt=40, response=8):
    """A prompt with responses of one length, no two of which begin with the same token."""
    stream = torch.Generator().manual_seed(0)
    common = drawn(stream, prompt)
    return [[torch.cat([common, own]) for (own,) in apart(responses, response)]]


def update(engine, groups):
    lengths = [[len(text) for text in texts] for texts in groups]
    sample = SequenceSample(
        ids=list(map(str, range(len(groups)))),
        seqlens={"packed_input_ids": lengths},
        data={"packed_input_ids": torch.cat([text for texts in groups for text in texts])},
    )
    engine.train_batch(
        sample,
        lambda output, _: -output.logprobs.sum(),
        lambda sample: sum(sample.flat_seqlens("packed_input_ids")),
    )


def flops_of_update(groups):
    engine = Subject().engine()
    with FlopCounterMode(display=False) as counter:
        update(engine, groups)
    return counter.get_total_flops()


def created_by_update(groups, **settings):
    engine = Subject().engine(**settings)
    with CreatedTensors() as created:
        update(engine, groups)
    return created


def test_an_update_of_twice_the_sequences_takes_twice_the_operations():
    four, eight, sixteen = (flops_of_update(apart(count, 12)) for count in (4, 8, 16))
    assert eight - four == four
    assert sixteen - eight == 2 * (eight - four)


def test_operations_of_a_token_grow_with_the_length_of_its_sequence_by_attention_alone():
    """48 tokens, in ever longer sequences: each time they attend to twice as many."""
    short, longer, longest = (flops_of_update(apart(48 // length, length)) for length in (4, 8, 16))
    assert longest - longer == pytest.approx(2 * (longer - short), rel=0.15)
    assert longest < 1.1 * short


def test_each_response_to_a_prompt_adds_only_its_own_tokens():
    two, four, eight = (flops_of_update(group(count)) for count in (2, 4, 8))
    assert eight - four == pytest.approx(2 * (four - two), rel=0.02)
    alone = flops_of_update(apart(4, 8)) - flops_of_update(apart(2, 8))
    assert four - two == pytest.approx(alone, rel=0.2)  # beside them, the prompt's keys


def test_more_sequences_create_larger_tensors_but_no_more_of_them():
    few, many = (created_by_update(apart(count, 12)) for count in (4, 16))
    assert many.count == few.count
    assert many.bytes < 4 * few.bytes


def test_more_responses_to_a_prompt_create_larger_tensors_but_no_more_of_them():
    few, many = (created_by_update(group(count)) for count in (2, 16))
    assert many.count == few.count
    assert many.bytes < 8 * few.bytes


def test_memory_of_a_group_grows_with_its_responses_not_with_copies_of_the_prompt():
    two, four, eight = (created_by_update(group(count)).bytes for count in (2, 4, 8))
    assert eight - four == pytest.approx(2 * (four - two), rel=0.1)
    unshared = created_by_update(group(8), share_prefixes=False).bytes
    assert eight < 0.5 * unshared


def test_a_pass_of_decoding_creates_as_many_tensors_for_one_response_as_for_many():
    def created(responses, new_tokens):
        settings = GenerationHyperparameters(
            responses_per_prompt=responses, max_new_tokens=new_tokens, min_new_tokens=new_tokens
        )
        prompt = drawn(torch.Generator().manual_seed(0), 6)
        sample = SequenceSample.from_default(
            ids=["0"], seqlens=[len(prompt)], data={"packed_prompts": prompt}
        )
        engine = Subject().engine(tokenizer=TinyTokenizer())
        with CreatedTensors() as counted:
            engine.generate(sample, TinyTokenizer(), settings, list(range(responses)))
        return counted.count

    per_pass = [created(responses, 6) - created(responses, 4) for responses in (2, 16)]
    assert per_pass[0] == per_pass[1] > 0
