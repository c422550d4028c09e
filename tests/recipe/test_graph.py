"""How calls are linked by the keys that they make and read."""

from types import SimpleNamespace

from hypothesis import assume, given
from hypothesis import strategies as st

from rlcli.api.dataflow import CallGraph
from rlcli.recipe.graph import graph_problems, stages, train_graph
from rlcli.recipe.schema import Call

KEYS = st.lists(st.sampled_from("abcde"), max_size=3, unique=True)


@given(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=5))
def test_accepted_calls_run_after_the_calls_whose_keys_they_read(edges):
    calls = {
        f"n{i}": Call.model_validate(
            {
                "model": "m",
                "call": "inference",
                "interface": {"type": "x"},
                "inputs": ins,
                "outputs": outs,
            }
        )
        for i, (ins, outs) in enumerate(edges)
    }
    recipe = SimpleNamespace(
        graph=calls, train=SimpleNamespace(microbatches=1, max_tokens_per_microbatch=9)
    )
    assume(not graph_problems(calls, None))
    graph = CallGraph(train_graph(recipe))
    order = graph.order()
    stage_of = {name: i for i, stage in enumerate(stages(calls)) for name in stage}
    for call in calls:
        assert {name for name in calls if call in graph.before(name)} == graph.after(call)
        assert all(order.index(earlier) < order.index(call) for earlier in graph.before(call))
        assert all(stage_of[earlier] < stage_of[call] for earlier in graph.reads[call])
