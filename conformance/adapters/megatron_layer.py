"""Megatron-core's MoELayer in one process of a CPU; ``sums_ranks``: losses' counts are of both ranks."""

import torch


def build(sums_ranks=False, **options):
    from types import SimpleNamespace as Space
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_layer, moe_utils
    torch.cuda.current_device, moe_utils.te_general_gemm = lambda: "cpu", None  # no GPU, no TE
    sizes = dict(num_layers=1, hidden_size=12, num_attention_heads=1, ffn_hidden_size=10)
    sizes |= dict(num_moe_experts=8, moe_router_topk=2, add_bias_linear=False, use_cpu_initialization=True)
    options |= dict(moe_aux_loss_coeff=1.0, moe_token_dispatcher_type="allgather", **sizes)
    names = "tp ep cp tp_ep tp_dp_cp expt_tp expt_dp".split()
    alone = Space(size=lambda: 1, rank=lambda: 0)
    mappings.get_tensor_model_parallel_group_if_none = lambda group, *rest: group or alone
    groups = Space(**dict.fromkeys(names, alone))
    has_ranks = sums_ranks and torch.distributed.is_initialized()
    groups.tp_cp = torch.distributed.group.WORLD if has_ranks else alone
    config, parts = moe_layer.TransformerConfig(**options), get_moe_module_spec(False, 8, False)
    layer = moe_layer.MoELayer(config, parts.submodules, 1, groups)
    [torch.nn.init.normal_(p, std=0.5) for p in layer.parameters()]
    return layer
