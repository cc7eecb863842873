"""Steps with hand-made records."""

import torch

from moecore.core.records import Batch, Guidance, ModelOutput, RoutingRecord, Step


def record(probs=None, load=None, logits=None):
    """A record of which only the given fields, as (B, T, E) nested lists or tensors, are meant to
    be read.
    """
    fields = [None if field is None else torch.as_tensor(field) for field in (logits, probs, load)]
    blank = torch.full_like(next(field for field in fields if field is not None), float("nan"))
    logits, probs, load = (blank if field is None else field for field in fields)
    return RoutingRecord(logits, probs, load, blank, blank)


def step(*records, guidance=None, progress=0.0):
    blank = torch.zeros(())
    teacher = (
        None
        if guidance is None
        else Guidance(blank, tuple(torch.as_tensor(probs) for probs in guidance))
    )
    return Step(Batch(blank, blank, blank), ModelOutput(blank, records), None, teacher, progress)
