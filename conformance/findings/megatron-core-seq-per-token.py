# megatron-core 0.16.1, "split the batch": the gradient of seq_aux_loss depends on the micro-batch
import torch
from types import SimpleNamespace as Space
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, router
torch.cuda.current_device, moe_utils.te_general_gemm = lambda: "cpu", None  # no GPU, no TE
mappings.get_tensor_model_parallel_group_if_none = lambda group, *rest: group
alone = Space(size=lambda: 1, rank=lambda: 0)
sizes = dict(num_layers=1, hidden_size=12, num_attention_heads=1, num_moe_experts=8, add_bias_linear=False)
loss = dict(moe_aux_loss_coeff=1.0, moe_router_load_balancing_type="seq_aux_loss")
config = TransformerConfig(**sizes, **loss, calculate_per_token_loss=True, use_cpu_initialization=True)
torch.manual_seed(0)
layer = router.TopKRouter(config, Space(tp=alone, cp=alone, tp_cp=alone, tp_dp_cp=alone))
torch.nn.init.normal_(layer.weight)
tokens = torch.randn(16, 4, 12)  # (sequence, batch, width)
for size in (1, 2, 4):
    layer.zero_grad()
    [(0 * layer(part.contiguous())[0].sum()).backward() for part in tokens.split(size, dim=1)]
    print("micro-batch", size, "gradient's norm per token:", float((layer.weight.grad / 64).norm()))
