"""Every mixture family of transformers that the lens reads: its sparse block, built small.

The block, its router's records (``moecore.trace``) and the loss of its file are the library's.
"""

import sys
from functools import partial

import torch
import transformers
from moecore.core.files import UserError
from moecore.nn.router_hooks import routing_collector
from moecore.testing import Target
from tools.router_families import build_model, find_families, find_models

EXPERTS = 8
SETUP = """from {module} import {kind} as Model
config = Model.config_class.from_dict({settings})
layer = Model(config).get_submodule("{path}")
[torch.nn.init.normal_(p, std=0.2 if p.ndim > 2 else 1) for p in layer.parameters()]"""


def run(layer, tokens, k=None):
    with routing_collector(layer) as records:
        output = layer(tokens)
    record, balance = records[0], vars(sys.modules[type(layer).__module__]).get("load_balancing_loss_func")
    shape = (*tokens.shape[:2], EXPERTS)
    fields = {name: getattr(record, name).view(shape) for name in ("logits", "probs", "chosen")}
    loss = balance((fields["logits"].flatten(0, 1),), EXPERTS, k) if balance and k else None
    output = output[0] if isinstance(output, tuple) else output
    return {**fields, "weights": record.combine.view(shape), "output": output.view_as(tokens), "loss": loss}


def find_block(family):
    """Return (model, path of a sparse block, name of its router), or None."""
    for kind in find_models(family):
        try:
            model = build_model(family, kind)
        except Exception:  # needs other settings: the next class
            continue
        for path, module in model.named_modules():
            if type(module).__name__ in find_families()[family]:
                return model, path.rpartition(".")[0], path.rpartition(".")[2]
    return None


def describe_family(family):
    block = find_block(family)
    if block is None:
        return None
    model, path, router = block
    config = getattr(model.config, "text_config", model.config)
    layer = model.get_submodule(path)
    k = next((getattr(config, name) for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k") if isinstance(getattr(config, name, None), int)), None)
    networks = next((name for name, _ in layer.named_children() if "expert" in name and "shared" not in name), "experts")
    bias = [n for n, v in [*layer.named_buffers(), *layer.named_parameters()] if "bias" in n and "shared" not in n and v.shape == (EXPERTS,) and ("correction" in n or "e_score" in n)]
    has_loss = "load_balancing_loss_func" in vars(sys.modules[type(layer).__module__])
    return Target(
        name=f"transformers-{family}", version=transformers.__version__, width=config.hidden_size,
        build=lambda: _redraw(layer), run=partial(run, k=k), experts=EXPERTS, router=router,
        networks=networks, k=k, causal=not model.config.is_encoder_decoder, selection_bias=bias[0] if bias else None,
        loss_mean="batch" if has_loss else None, even_loss=1.0 if has_loss else None,
        not_promised={"recompute activations": "the lens records no recomputation"},
    )


def _redraw(layer):
    for name, value in layer.named_parameters():
        value.data = torch.randn(value.shape) * (1.0 if value.ndim < 3 else 0.2)
    import copy

    return copy.deepcopy(layer)


def targets():
    transformers.logging.set_verbosity_error()
    import os

    wanted = os.environ.get("FAMILIES", "").split() or list(find_families())
    return [target for family in wanted if (target := describe_family(family)) is not None]


TARGETS = targets
