"""A training step as a graph takes it: advantages are computed once,
and a role learns from them."""

import dataclasses

from rlcli.api.model import MicroBatchSpec, call_interface

SPEC = MicroBatchSpec()


def with_settings(settings, *classes):
    """An interface of each class, with the settings that it has,
    as blocks of a recipe that several calls share."""
    fields = [{field.name for field in dataclasses.fields(cls) if field.init} for cls in classes]
    assert set(settings) <= set().union(*fields), "a setting that none of them has"
    shares = [
        {name: value for name, value in settings.items() if name in names} for names in fields
    ]
    return [cls(**share) for cls, share in zip(classes, shares, strict=True)]


def read_by(interface, method, batch):
    """The keys of the batch that a call of the interface receives."""
    declared = interface.reads(method)
    assert declared is not None
    return batch.select([key for key in declared.needed + declared.if_given if key in batch.keys])


def rate(advantages, model, rollout):
    """(the rollout with the outputs of a call for advantages, the means that the call reports).
    Log-probs of the trainer and of a reference are there only if the interface reads them, as in a
    graph without these calls."""
    received = read_by(advantages, "inference", rollout)
    batch = rollout.select(
        (rollout.keys - {"proximal_logprobs", "packed_ref_logprobs"}) | received.keys
    )
    output = advantages.inference(model, received, SPEC)
    batch.update_(output)
    batch.metadata = rollout.metadata
    return batch, means(output.metadata)


def means(metadata):
    """Of numbers that are reported as a (sum, count) for each sample."""
    totals = {
        name: [sum(column) for column in zip(*pairs, strict=True)]
        for name, pairs in metadata.items()
    }
    return {name: total / count for name, (total, count) in totals.items() if count}


def learn(learner, advantages, model, rollout, mb_spec=SPEC):
    """Numbers of the advantages and of a training step on them."""
    batch, numbers = rate(advantages, model, rollout)
    stats = call_interface(
        learner, "train_step", model, read_by(learner, "train_step", batch), mb_spec
    )
    return numbers | stats
