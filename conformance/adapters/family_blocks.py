"""Mixture families of transformers that the lens reads: their sparse blocks, built small."""

import copy
import re
import sys

import torch
import transformers
from moecore.nn.routing_collection import routing_collector
from moecore.testing import Target
from tools.router_families import build_model, find_families, find_models

K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
FAMILIES = find_families()  # reads all files of transformers


def find_block(family):
    """Return (model, path of a sparse block, name of its router); ValueError with the reasons if there is none."""
    refusals, routers = [], FAMILIES[family]
    for kind in find_models(family):
        try:
            model = build_model(family, kind)
        except Exception as error:  # needs other settings: the next class
            refusals.append(f"{kind.__name__}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        named = [(path, type(module).__name__) for path, module in model.named_modules()]
        for name, path in [(n, p) for n in routers for p, kind in named if kind == n]:
            block = path.rpartition(".")[0]
            if not hasattr(model.get_submodule(block), "self_attn"):
                return model, block, path.rpartition(".")[2]
            refusals.append(f"{name} is in a decoder layer, not in a sparse block")
            break
        else:
            refusals.append(f"{kind.__name__} has no router")
    raise ValueError("; ".join(dict.fromkeys(refusals)))


def redraw_block(layer):
    """Return a copy of a block with random weights and no bias."""
    layer = copy.deepcopy(layer)
    for name, value in [*layer.named_buffers(), *layer.named_parameters()]:
        value.data = torch.zeros_like(value) if "bias" in name else 0.3 * torch.randn(value.shape)
    return layer


def find_loss(layer):
    """Return ``load_balancing_loss_func`` of the file of a block, None without one."""
    return vars(sys.modules[type(layer).__module__]).get("load_balancing_loss_func")


def read_conventions(model, layer, router):
    """Return fields of a target that the configuration and the names of parameters state."""
    config = getattr(model.config, "text_config", model.config)
    given = [getattr(config, name, None) for name in K]
    k = next((value for value in given if isinstance(value, int)), None)
    names = [name for name, _ in layer.named_children()]
    routed = [name for name in names if "expert" in name and "shared" not in name]
    routed.sort(key=lambda name: name != "experts")
    reasons = {"recompute activations": "not measured: the lens records no recomputation"}
    if (getattr(config, "n_group", None) or 1) > 1:
        reasons["round to bf16"] = "not measured: groups are chosen, too, by margins that no record has"
    if hasattr(config, "expert_capacity") and model.config.model_type != "nllb-moe":
        reasons["permute tokens"] = 'its capacity drops tokens ("expert_capacity")'
    if not routed:  # JetMoE
        reasons["permute experts"] = "not measured: an expert has parameters in two modules"
    with routing_collector(layer) as records:
        layer(torch.randn(1, 4, config.hidden_size))
    experts = records[0].combine.shape[-1]
    bias = [
        name
        for name, value in [*layer.named_buffers(), *layer.named_parameters()]
        if re.search(r"correction_bias|^expert_bias", name) and value.numel() == experts
    ]
    stated = {"width": config.hidden_size, "experts": experts, "k": k, "router": router}
    stated |= {"networks": next(iter(routed), "input_linear"), "not_promised": reasons}
    if find_loss(layer):
        stated |= {"loss_mean": "batch", "even_loss": 1.0}
    causal = not model.config.is_encoder_decoder
    return {**stated, "causal": causal, "selection_bias": next(iter(bias), None)}


def list_families(wanted):
    """Return the families of this transformers, or those in ``wanted``, words."""
    transformers.logging.set_verbosity_error()
    return wanted.split() or list(FAMILIES)


def refuse_family(family, reason):
    """Return a target of a family that cannot be built: no law of it runs, for this reason."""

    def build():
        raise ValueError(reason)

    name, number = f"transformers-{family}", transformers.__version__
    return Target(name=name, version=number, build=build, run=build, width=1, experts=8)
