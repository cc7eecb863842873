# deepspeed 0.19.8: with the defaults of top-1 and top-2, evaluation draws random numbers
import torch
from deepspeed.moe.sharded_moe import TopKGate
for k in (1, 2, 3):
    torch.manual_seed(0)
    gate, tokens, state = TopKGate(12, 4, k=k).eval(), torch.randn(64, 12), torch.get_rng_state()
    first, second = ((gate(tokens)[1] != 0).any(-1) for _ in range(2))
    print("k =", k, "draws random numbers:", not torch.equal(state, torch.get_rng_state()),
          "tokens with other experts the second time:", int((first != second).any(-1).sum()))
