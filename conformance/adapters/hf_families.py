"""Every mixture family of transformers that the lens reads: its sparse block, built small.

The block, its router's records (``moecore.trace``) and the loss of its file are the library's.
``FAMILIES="olmoe mixtral"`` chooses some.
"""

import os
from functools import partial

import family_blocks as blocks
from moecore.testing import Target

LOSS = {"sum load shares": "transformers-sum-load-shares.py"}
NLLB = dict.fromkeys(("count dispatched tokens", "permute experts"), "transformers-nllb_moe.py")


def run(layer, tokens, k):
    from moecore.nn.routing_collection import routing_collector
    with routing_collector(layer) as records:
        output = layer(tokens)
    record, balance, size = records[0], blocks.find_loss(layer), (*tokens.shape[:2], -1)
    fields = {name: getattr(record, name).view(size) for name in ("logits", "probs", "chosen")}
    loss = balance((fields["logits"].flatten(0, 1),), record.logits.shape[-1], k) if balance and k else None
    output = output[0] if isinstance(output, tuple) else output
    return dict(output=output.view_as(tokens), weights=record.combine.view(size), loss=loss, **fields)


def targets():
    for family in blocks.list_families(os.environ.get("FAMILIES", "")):
        try:
            model, path, router = blocks.find_block(family)
        except ValueError as reason:
            yield blocks.refuse_family(family, str(reason))
            continue
        layer = model.get_submodule(path)
        stated = blocks.read_conventions(model, layer, router)
        named = dict(name=f"transformers-{family}", version=blocks.transformers.__version__)
        named |= dict(scripts=NLLB if family == "nllb_moe" else LOSS)
        build = partial(blocks.redraw_block, layer)
        yield Target(build=build, run=partial(run, k=stated["k"]), **named, **stated)


TARGETS = targets
