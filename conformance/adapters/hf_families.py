"""Every mixture family of transformers that the lens reads: its sparse block, built small.

The block, its router's records (``moecore.trace``) and the loss of its file are the library's.
"""

import copy
import os
import re
import sys
from functools import partial

import torch
import transformers
from moecore.nn.router_hooks import routing_collector
from moecore.testing import Target
from tools.router_families import build_model, find_families, find_models

EXPERTS = 8
K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
BIAS = r"correction_bias|^expert_bias"
RECOMPUTED = {"recompute activations": "the lens records no recomputation"}
GROUPED = {"round to bf16": "groups are chosen, too, by margins that no record has"}
NOT_PROMISED = {
    "switch_transformers": {"permute tokens": "tokens are served in their order"},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1"), GROUPED),
}
SETUP = """from {module} import {kind} as Model
layer = Model(Model.config_class.from_dict({settings})).get_submodule("{path}")
torch.manual_seed(0); [torch.nn.init.normal_(p, std=0.3) for p in layer.parameters()]
seen = []; layer.{router}.register_forward_hook(lambda m, given, out: seen.append(out))
balance = vars(__import__("sys").modules[type(layer).__module__]).get("load_balancing_loss_func")
def run(layer, tokens):
    output = layer(tokens); logits = next(v for v in seen[-1] if v.shape[-1] == 8)
    loss = balance((logits.flatten(0, -2),), 8, {k}) if balance else None
    used = [perturb_expert(layer, e, tokens) for e in range(8)]
    return dict(output=output, loss=loss, weights=torch.stack(used, -1))
def perturb_expert(layer, e, tokens):  # which tokens' outputs depend on expert e
    twin = copy.deepcopy(layer); listed = [p for n, p in twin.experts.named_parameters() if f"expert_{{e}}." in n]
    [p.data.mul_(2) for p in listed or [p[e] for p in twin.experts.parameters()]]
    return (twin(tokens) != layer(tokens)).any(-1).float()"""


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
    layer, config = model.get_submodule(path), getattr(model.config, "text_config", model.config)
    k = next((getattr(config, name) for name in K if isinstance(getattr(config, name, None), int)), None)
    children = [name for name, _ in layer.named_children()]
    networks = next((name for name in children if "expert" in name and "shared" not in name), "experts")
    named = [*layer.named_buffers(), *layer.named_parameters()]
    bias = [name for name, value in named if re.search(BIAS, name) and value.numel() == EXPERTS]
    has_loss = "load_balancing_loss_func" in vars(sys.modules[type(layer).__module__])
    setup = SETUP.format(
        module=type(model).__module__, kind=type(model).__name__, path=path, router=router, k=k,
        settings={n: v for n, v in model.config.to_diff_dict().items() if n != "transformers_version"},
    )
    return Target(
        name=f"transformers-{family}", version=transformers.__version__, width=config.hidden_size,
        build=partial(redraw_block, layer), run=partial(run, k=k), experts=EXPERTS, router=router,
        networks=networks, k=k, causal=not model.config.is_encoder_decoder, setup=setup,
        selection_bias=bias[0] if bias else None,
        loss_mean="batch" if has_loss else None, even_loss=1.0 if has_loss else None,
        not_promised=dict(NOT_PROMISED.get(family, ()), **RECOMPUTED),
    )


def redraw_block(layer):
    layer = copy.deepcopy(layer)
    for name, value in [*layer.named_buffers(), *layer.named_parameters()]:
        value.data = torch.zeros_like(value) if "bias" in name else 0.3 * torch.randn(value.shape)
    return layer


def targets():
    transformers.logging.set_verbosity_error()
    wanted = os.environ.get("FAMILIES", "").split() or find_families()
    return [target for family in wanted if (target := describe_family(family)) is not None]


TARGETS = targets
