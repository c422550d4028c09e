"""What a SequenceSample accepts and refuses, including the known traps of its predecessors."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlcli.api.data import SequenceSample


def batch(ids=("a", "b", "c"), lengths=((3,), (2, 4), (1,)), **changes):
    """Three samples of 3, 2 + 4 and 1 tokens."""
    total = sum(map(sum, lengths))
    fields = {
        "ids": list(ids),
        "seqlens": {
            "packed_input_ids": [list(n) for n in lengths],
            "values": [list(n) for n in lengths],
        },
        "data": {
            "packed_input_ids": torch.arange(total),
            "values": torch.randn(total, dtype=torch.bfloat16),
        },
        "metadata": {"answer": [f"answer {i}" for i in ids]},
    }
    return SequenceSample(**(fields | changes))


def description(**changes):
    fields = {
        "ids": ["a"],
        "seqlens": {"x": [2]},
        "dtypes": {"x": torch.int64},
        "trailing_shapes": {"x": ()},
    }
    return SequenceSample(**(fields | changes))


# -- construction ----------------------------------------------------------------------------------


def test_traits_and_keys_are_inferred_from_the_data():
    sample = batch()
    assert sample.keys == {"packed_input_ids", "values"}
    assert sample.dtypes == {"packed_input_ids": torch.int64, "values": torch.bfloat16}
    assert sample.trailing_shapes == {"packed_input_ids": (), "values": ()}
    assert (sample.bs, sample.flat_seqlens("values")) == (3, [3, 2, 4, 1])
    assert sample.cu_seqlens("values").tolist() == [0, 3, 5, 9, 10]
    assert sample.cu_seqlens("values").dtype == torch.int32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ["a", "b", "a"]}, "more than once.*'a'"),
        ({"ids": ["a", "b"]}, "are for 3 samples, not for 2"),
        ({"keys": ["values", "packed_input_ids", "values"]}, "occur twice: .'values'."),
        ({"keys": {"values"}}, "seqlens and keys differ"),
        ({"keys": "values"}, "is the string"),
        (
            {"data": {"values": torch.zeros(10)}},
            "data and keys differ: missing .'packed_input_ids'.",
        ),
        ({"data": {"packed_input_ids": torch.arange(9), "values": torch.zeros(10)}}, "shape"),
        ({"data": {"packed_input_ids": [1] * 10, "values": torch.zeros(10)}}, "not a tensor"),
        ({"data": {"packed_input_ids": torch.tensor(1), "values": torch.zeros(10)}}, "shape"),
        (
            {"dtypes": {"packed_input_ids": torch.int64, "values": torch.float32}},
            "dtype torch.bfloat16",
        ),
        ({"dtypes": {"packed_input_ids": torch.int64}}, "dtypes and keys differ"),
        ({"dtypes": {"packed_input_ids": "int64", "values": torch.bfloat16}}, "not a torch.dtype"),
        ({"trailing_shapes": {"packed_input_ids": (), "values": (2,)}}, "shape"),
        ({"trailing_shapes": {"packed_input_ids": (), "values": 2}}, "not a tuple"),
        ({"metadata": {"answer": ("1", "2", "3")}}, "must be a list"),
        ({"metadata": {"answer": "123"}}, "must be a list"),
        ({"metadata": {"answer": ["1"]}}, "1 entries for 3 samples"),
        ({"metadata": {1: ["1", "2", "3"]}}, "not strings"),
    ],
)
def test_inconsistent_fields_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        batch(**changes)


def test_a_string_is_refused_as_a_list_of_ids():
    with pytest.raises(ValueError, match="ids is a str, not a list"):
        description(ids="a")


def test_unknown_constructor_arguments_are_refused():
    with pytest.raises(TypeError, match="metdata"):
        batch(metdata={})


def test_a_description_without_dtypes_is_refused():
    assert description().data is None
    with pytest.raises(ValueError, match="cannot be inferred without data"):
        description(dtypes=None)
    with pytest.raises(ValueError, match=r"not a torch\.dtype"):
        description(dtypes={"x": "int64"})


def test_the_constructor_copies_its_arguments():
    seqlens, answers, data = {"x": [[1]]}, ["1"], {"x": torch.zeros(1)}
    sample = SequenceSample(ids=["a"], seqlens=seqlens, data=data, metadata={"answer": answers})
    seqlens["x"][0].append(7)
    answers.append("2")
    data.clear()
    assert (sample.seqlens, sample.metadata, list(sample.data)) == (
        {"x": [[1]]},
        {"answer": ["1"]},
        ["x"],
    )


def test_keys_are_sorted_in_every_mapping():
    names = ["zeta", "alpha", "mid"]
    sample = SequenceSample(
        ids=["a"],
        keys=set(names),
        seqlens={n: [0] for n in names},
        data={n: torch.zeros(0) for n in names},
    )
    sample.update_(sample.select(["zeta"]))
    assert list(sample.keys) == sorted(names)
    for mapping in (sample.data, sample.seqlens, sample.dtypes, sample.trailing_shapes):
        assert list(mapping) == sorted(names)


def test_copies_and_pickles_have_the_same_keys_and_data():
    sample = batch()
    for twin in (copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert twin.keys == sample.keys
        assert list(twin.keys) == list(sample.keys)
        assert torch.equal(twin.data["values"], sample.data["values"])


def test_gather_does_not_disable_validation_in_other_threads():
    def gather_many(_):
        for _ in range(200):
            SequenceSample.gather([batch(["a", "b", "c"]), batch(["d", "e", "f"])])

    def refuse_many(_):
        for _ in range(200):
            with pytest.raises(ValueError, match="more than once"):
                batch(["a", "a", "b"])

    with ThreadPoolExecutor(4) as pool:
        for _ in [*pool.map(gather_many, range(2)), *pool.map(refuse_many, range(2))]:
            pass


# -- gather, update_, remap_keys_, meta ------------------------------------------------------------


def test_gather_refuses_an_empty_list_and_duplicate_ids():
    with pytest.raises(ValueError, match="nothing to gather"):
        SequenceSample.gather([])
    with pytest.raises(ValueError, match="'b'"):
        SequenceSample.gather([batch(["a", "b", "c"]), batch(["d", "b", "e"])])


@pytest.mark.parametrize(
    ("mismatched", "message"),
    [
        (batch(["d", "e", "f"]).select(["values"]), "keys"),
        (batch(["d", "e", "f"]).meta(), "holds the data of None"),
        (batch(["d", "e", "f"], metadata={}), "metadata names"),
        (
            batch(
                ["d", "e", "f"],
                data={"packed_input_ids": torch.arange(10), "values": torch.zeros(10)},
            ),
            "dtypes",
        ),
        (
            batch(
                ["d", "e", "f"],
                data={
                    "packed_input_ids": torch.arange(10),
                    "values": torch.zeros(10, 2).bfloat16(),
                },
            ),
            "trailing shapes",
        ),
        (
            batch(
                ["d", "e", "f"],
                data={"packed_input_ids": None, "values": torch.zeros(10).bfloat16()},
                dtypes={"packed_input_ids": torch.int64, "values": torch.bfloat16},
                trailing_shapes={"packed_input_ids": (), "values": ()},
            ),
            r"holds the data of \['values'\]",
        ),
    ],
)
def test_gather_refuses_samples_with_different_traits(mismatched, message):
    for pair in ([batch(), mismatched], [mismatched, batch()]):
        with pytest.raises(ValueError, match="cannot gather"):
            SequenceSample.gather(pair)
    with pytest.raises(ValueError, match=message):
        SequenceSample.gather([batch(), mismatched])


def test_gather_selects_keys_that_all_samples_have():
    parts = [batch(), batch(["d", "e", "f"]).select(["values"])]
    assert SequenceSample.gather(parts, keys=["values"]).keys == {"values"}
    with pytest.raises(ValueError, match="there is no key 'packed_input_ids'"):
        SequenceSample.gather(parts, keys=["values", "packed_input_ids"])


def test_gather_skips_empty_samples_and_accepts_only_empty_ones():
    empty = batch().select_indices([])
    assert SequenceSample.gather([empty, batch(), empty]).ids == ["a", "b", "c"]
    assert SequenceSample.gather([empty, empty]).bs == 0
    assert SequenceSample.gather([empty, empty]).data["values"].dtype == torch.bfloat16


def test_keys_without_a_tensor_survive_unpack_and_gather():
    sample = SequenceSample(ids=["a", "b"], seqlens={"x": [1, 1]}, data={"x": None})
    gathered = SequenceSample.gather(sample.unpack())
    assert gathered.data == {"x": None}
    assert gathered.dtypes == {"x": None}


def test_update_adds_new_keys_and_replaces_existing_ones():
    sample = batch()
    addition = SequenceSample(
        ids=["a", "b", "c"],
        seqlens={"values": [1, 1, 1], "rewards": [1, 1, 1]},
        data={"values": torch.ones(3), "rewards": torch.ones(3)},
        metadata={"score": [1, 2, 3]},
    )
    sample.update_(addition)
    assert sample.keys == {"packed_input_ids", "rewards", "values"}
    assert sample.seqlens["values"] == [[1], [1], [1]]
    assert sample.dtypes["values"] == torch.float32
    assert sample.metadata.keys() == {"answer", "score"}
    addition.seqlens["rewards"][0].append(9)
    addition.metadata["score"].clear()
    assert sample.seqlens["rewards"] == [[1], [1], [1]]
    assert sample.metadata["score"] == [1, 2, 3]
    SequenceSample.from_json(sample.as_json())  # still valid as a whole


@pytest.mark.parametrize(
    ("sample", "addition", "message"),
    [
        (batch(), batch(["a", "c", "b"]), "another order"),
        (batch(), batch(["a", "b", "d"]), "other ids"),
        (batch(), batch().meta(), "the other has none"),
        (batch().meta(), batch(), "the other batch has data and this has none"),
    ],
)
def test_a_refused_update_leaves_the_sample_unchanged(sample, addition, message):
    before = sample.as_json()
    with pytest.raises(ValueError, match=message):
        sample.update_(addition)
    assert sample.as_json() == before


def test_a_description_is_updated_by_a_description():
    described = batch().meta()
    described.update_(description(ids=["a", "b", "c"], seqlens={"x": [1, 1, 1]}))
    assert described.keys == {"packed_input_ids", "values", "x"}
    assert described.data is None


def test_two_keys_can_swap_names():
    sample = batch()
    before = dict(sample.data)
    sample.remap_keys_({"packed_input_ids": "values", "values": "packed_input_ids"})
    assert sample.data["values"] is before["packed_input_ids"]
    assert sample.data["packed_input_ids"] is before["values"]
    assert sample.dtypes == {"packed_input_ids": torch.bfloat16, "values": torch.int64}


def test_renaming_in_a_chain_does_not_depend_on_order():
    chain = {"values": "x", "packed_input_ids": "values"}
    for remap in (chain, dict(reversed(chain.items()))):
        sample = batch()
        sample.remap_keys_(remap)
        assert sample.keys == {"values", "x"}
        assert sample.dtypes["values"] == torch.int64


@pytest.mark.parametrize(
    ("remap", "message"),
    [
        ({"values": "packed_input_ids"}, "same name"),
        ({"values": "x", "packed_input_ids": "x"}, "same name"),
        ({"valuse": "x"}, "no key 'valuse'"),
    ],
)
def test_renaming_to_an_existing_or_from_an_unknown_key_is_refused(remap, message):
    sample = batch()
    with pytest.raises(ValueError, match=message):
        sample.remap_keys_(remap)
    assert sample.keys == {"packed_input_ids", "values"}


def test_a_description_shares_nothing_with_its_parent():
    parent = batch(metadata={"rows": [{"n": 1}, {"n": 2}, {"n": 3}]})
    described = parent.meta()
    described.ids.append("d")
    described.seqlens["values"][0].append(7)
    described.metadata["rows"][0]["n"] = 99
    described.dtypes.clear()
    described.trailing_shapes.clear()
    described.remap_keys_({})
    assert parent.ids == ["a", "b", "c"]
    assert parent.seqlens["values"][0] == [3]
    assert parent.metadata["rows"][0] == {"n": 1}
    assert parent.dtypes.keys() == parent.trailing_shapes.keys() == {"packed_input_ids", "values"}


# -- other forms -----------------------------------------------------------------------------------


def test_moving_to_a_device_keeps_dtypes_and_the_original():
    sample = batch()
    moved = sample.to("meta")
    assert moved.data["values"].device.type == "meta"
    assert moved.data["values"].dtype == torch.bfloat16
    assert sample.data["values"].device.type == "cpu"
    assert sample.cpu() is sample
    assert batch().meta().to("cpu").data is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtypes", {"packed_input_ids": "int64", "values": "save"}),
        ("dtypes", {"packed_input_ids": "int64", "values": ["bfloat16"]}),
        ("data", {"packed_input_ids": [True] * 10, "values": [0.0] * 10}),
        ("data", {"packed_input_ids": [0.5] * 10, "values": [0.0] * 10}),
        ("data", {"packed_input_ids": [1] * 9, "values": [0.0] * 10}),
        ("data", {"packed_input_ids": [1] * 10, "values": ["many"] * 10}),
        ("data", {"packed_input_ids": 10, "values": [0.0] * 10}),
        ("seqlens", {"packed_input_ids": [[3]], "values": [[3]]}),
        ("ids", ["a", "a", "b"]),
        ("metadata", {"answer": "123"}),
        ("extra", 1),
    ],
)
def test_invalid_json_is_refused(field, value):
    encoded = batch().as_json() | {field: value}
    with pytest.raises(ValueError, match=r"\w"):
        SequenceSample.from_json(encoded)


def test_ids_that_json_cannot_represent_are_refused():
    with pytest.raises(ValueError, match="neither strings nor ints"):
        SequenceSample(ids=[("a", 1)], seqlens={"x": [1]}, data={"x": torch.ones(1)}).as_json()
