# megatron-core 0.16.1, "agree over ranks": with a loss per token, aux_loss depends on the ranks
import tempfile, torch
from types import SimpleNamespace as Space
from torch import distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, router
torch.cuda.current_device, moe_utils.te_general_gemm = lambda: "cpu", None  # no GPU, no TE
sizes = dict(num_layers=1, hidden_size=12, num_attention_heads=1, num_moe_experts=8, add_bias_linear=False)
loss = dict(moe_aux_loss_coeff=1.0, calculate_per_token_loss=True, use_cpu_initialization=True)
def measure(rank, ranks, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    layer = router.TopKRouter(TransformerConfig(**sizes, **loss), Space(**dict.fromkeys(groups, dist.group.WORLD)))
    torch.manual_seed(0); torch.nn.init.normal_(layer.weight)
    (0 * layer(torch.randn(16, 4, 12).chunk(ranks)[rank])[0].sum()).backward()
    dist.all_reduce(layer.weight.grad)  # as for parts of a sequence
    if rank == 0: print("ranks:", ranks, "gradient's norm per token:", float(layer.weight.grad.norm() / 64))
groups = ("tp", "cp", "tp_cp", "tp_dp_cp")
for ranks in (1, 2):
    file = tempfile.mktemp()
    torch.multiprocessing.start_processes(measure, (ranks, file), nprocs=ranks, start_method="fork")
