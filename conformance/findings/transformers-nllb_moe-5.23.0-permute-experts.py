# transformers-nllb_moe 5.23.0, "permute experts": permuted experts give the same layer: output differs by up to 6.57
import copy, functools, torch
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeForConditionalGeneration as Model
layer = Model(Model.config_class.from_dict({'is_encoder_decoder': True, 'vocab_size': 64, 'max_position_embeddings': 256, 'encoder_layers': 4, 'encoder_ffn_dim': 16, 'encoder_attention_heads': 4, 'decoder_layers': 4, 'decoder_ffn_dim': 16, 'decoder_attention_heads': 4, 'encoder_layerdrop': 0.05, 'decoder_layerdrop': 0.05, 'use_cache': True, 'activation_function': 'relu', 'd_model': 32, 'dropout': 0.1, 'attention_dropout': 0.1, 'activation_dropout': 0.0, 'init_std': 0.02, 'decoder_start_token_id': 1, 'scale_embedding': True, 'router_bias': False, 'router_dtype': 'float32', 'router_ignore_padding_tokens': False, 'num_experts': 8, 'expert_capacity': 2, 'encoder_sparse_step': 4, 'decoder_sparse_step': 4, 'router_z_loss_coef': 0.001, 'router_aux_loss_coef': 0.001, 'second_expert_policy': 'all', 'normalize_router_prob_before_dropping': False, 'batch_prioritized_routing': False, 'moe_eval_capacity_token_fraction': 1.0, 'moe_token_dropout': 0.2, 'pad_token_id': 0, 'bos_token_id': 0, 'eos_token_id': 1, 'tie_word_embeddings': True, 'output_router_logits': False, 'model_type': 'nllb-moe'})).get_submodule("model.encoder.layers.3.ffn")
torch.manual_seed(0); [torch.nn.init.normal_(p, std=0.3) for p in layer.parameters()]
seen = []; layer.router.register_forward_hook(lambda m, given, out: seen.append(out))
balance = vars(__import__("sys").modules[type(layer).__module__]).get("load_balancing_loss_func")
def run(layer, tokens):
    output = layer(tokens); logits = next(v for v in seen[-1] if v.shape[-1] == 8)
    loss = balance((logits.flatten(0, -2),), 8, None) if balance else None
    used = [perturb_expert(layer, e, tokens) for e in range(8)]
    return dict(output=output, loss=loss, weights=torch.stack(used, -1))
def perturb_expert(layer, e, tokens):  # which tokens' outputs depend on expert e
    twin = copy.deepcopy(layer); listed = [p for n, p in twin.experts.named_parameters() if f"expert_{e}." in n]
    [p.data.mul_(2) for p in listed or [p[e] for p in twin.experts.parameters()]]
    return (twin(tokens) != layer(tokens)).any(-1).float()
torch.manual_seed(0); layer = layer
x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
layer.train(); out = run(layer, x)
print({n: v for n, v in out.items() if n in ("counts", "loss", "statistics")})
print("tokens with a weight, per expert:", (out["weights"] != 0).flatten(0, -2).sum(0).tolist())
