# transformers-qwen2_moe 5.23.0, "sum load shares": with equal probabilities the loss is 1: found 2
import copy, functools, torch
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM as Model
layer = Model(Model.config_class.from_dict({'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 16, 'num_hidden_layers': 4, 'num_attention_heads': 4, 'num_key_value_heads': 4, 'hidden_act': 'silu', 'max_position_embeddings': 256, 'initializer_range': 0.02, 'rms_norm_eps': 1e-06, 'use_cache': True, 'tie_word_embeddings': False, 'rope_parameters': {'rope_theta': 10000.0, 'rope_type': 'default'}, 'use_sliding_window': False, 'sliding_window': 0, 'max_window_layers': 28, 'attention_dropout': 0.0, 'decoder_sparse_step': 1, 'moe_intermediate_size': 16, 'shared_expert_intermediate_size': 16, 'num_experts_per_tok': 2, 'num_experts': 8, 'norm_topk_prob': False, 'output_router_logits': False, 'router_aux_loss_coef': 0.001, 'mlp_only_layers': [], 'qkv_bias': True, 'layer_types': ['full_attention', 'full_attention', 'full_attention', 'full_attention'], 'pad_token_id': 0, 'bos_token_id': None, 'eos_token_id': None, 'model_type': 'qwen2_moe'})).get_submodule("model.layers.0.mlp")
torch.manual_seed(0); [torch.nn.init.normal_(p, std=0.3) for p in layer.parameters()]
seen = []; layer.gate.register_forward_hook(lambda m, given, out: seen.append(out))
balance = vars(__import__("sys").modules[type(layer).__module__]).get("load_balancing_loss_func")
def run(layer, tokens):
    output = layer(tokens); logits = next(v for v in seen[-1] if v.shape[-1] == 8)
    loss = balance((logits.flatten(0, -2),), 8, 2) if balance else None
    used = [perturb_expert(layer, e, tokens) for e in range(8)]
    return dict(output=output, loss=loss, weights=torch.stack(used, -1))
def perturb_expert(layer, e, tokens):  # which tokens' outputs depend on expert e
    twin = copy.deepcopy(layer); listed = [p for n, p in twin.experts.named_parameters() if f"expert_{e}." in n]
    [p.data.mul_(2) for p in listed or [p[e] for p in twin.experts.parameters()]]
    return (twin(tokens) != layer(tokens)).any(-1).float()
torch.manual_seed(0); layer = layer
x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
[p.data.zero_() for p in [p for n, p in layer.named_parameters() if n.startswith('gate') and n != 'None']]
layer.train(); print("loss with equal probabilities:", float(run(layer, x)["loss"]), "stated:", 1.0)
