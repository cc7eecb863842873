# mlx-lm 0.31.3, LFM2-MoE: softmax instead of sigmoid, and the selection bias is in the weights
from types import SimpleNamespace
import mlx.core as mx
from mlx_lm.models.lfm2_moe import Lfm2MoeSparseMoeBlock
mx.random.seed(0)
sizes = dict(hidden_size=12, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2)
options = dict(norm_topk_prob=True, use_expert_bias=True, routed_scaling_factor=1.0)
block = Lfm2MoeSparseMoeBlock(SimpleNamespace(**sizes, **options))
block.switch_mlp = lambda values, ids: mx.eye(4)[ids]  # the outputs are the weights
token = mx.random.normal((1, 12))
scores = mx.sigmoid(block.gate(token))
best = mx.sort(scores)[0, 2:]
print("sigmoid of the logits:", scores, "the two largest, over their sum:", best / best.sum())
for bias in (0.0, 3.0, -3.0):
    block.expert_bias = mx.full((4,), bias)
    print("bias of every expert:", bias, "weights:", block(token))
