"""One training over several ranks: a replica of the model whose parameters are sharded.

The ranks lie on a mesh (replicate, shard). Shard 1: every rank holds all parameters, gradients are
averaged (data parallelism); replicate 1: all is spread over all ranks (FSDP2). With
``expert_parallel`` tokens travel to the ranks that hold their experts. Between steps the job's own
model, whole on every rank, is brought up to date: it is validated and saved as ever.
"""

import copy

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moecore.core.files import UserError
from moecore.core.ranks import current_ranks
from moecore.nn.kernels.expert_parallel import ShardedExperts
from moecore.nn.layers.block import Block
from moecore.nn.layers.language_block import LanguageBlock
from moecore.nn.layers.moe import MoEFeedForward
from moecore.training.job import TrainingJob
from moecore.training.settings import Training
from moecore.training.sharded_state import optimizer_parameters, shard_like, to_full_tensor

FEW = 8  # up to so many shards parameters stay whole between forward and backward


class DistributedTraining:
    """A job's training on this rank and all others."""

    def __init__(self, job: TrainingJob, settings: Training, device: str) -> None:
        """``job.model`` on every rank is the same, and stays whole.

        Raises UserError where the ranks do not divide into so many shards, or images that share a
        capacity would be of several ranks.
        """
        self.whole = job
        check_rank_batches(job.model, settings.batch)
        shard = settings.shard
        check_expert_parallel(job.model, settings)
        mesh = build_mesh(shard, device)
        model = copy.deepcopy(job.model)
        apart = shard_experts(model, mesh) if settings.expert_parallel > 1 else set()
        for module in model.modules():
            if isinstance(module, Block | LanguageBlock):
                fully_shard(
                    module, mesh=mesh, reshard_after_forward=shard > FEW, ignored_params=apart
                )
        fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=apart)
        self.job = job._replace(model=model)

    def gather(self) -> None:
        """Bring the whole model up to date, on every rank."""
        state = self.job.model.state_dict()
        self.whole.model.load_state_dict(
            {name: to_full_tensor(value) for name, value in state.items()}
        )

    @torch.no_grad()
    def scatter(self) -> None:
        """Take over the first rank's whole model."""
        state = self.whole.model.state_dict()
        for name, value in self.job.model.state_dict().items():
            value.copy_(shard_like(state[name], value))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        """Average the gradients that are not sharded, and clip all."""
        sharded: dict[Tensor, Tensor] = {}
        others: dict[Tensor, Tensor] = {}
        for parameter in optimizer_parameters(optimizer):
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                sharded[parameter] = parameter.grad
            elif parameter.grad is not None:
                others[parameter] = parameter.grad
                distributed.all_reduce(parameter.grad)
                parameter.grad.div_(current_ranks().size)
        if clip is not None:
            kinds = [kind for kind in (sharded, others) if kind]
            norms = [
                to_full_tensor(get_total_norm(list(kind.values()), foreach=True)) for kind in kinds
            ]
            total = torch.linalg.vector_norm(torch.stack(norms))
            for kind in kinds:
                clip_grads_with_norm_(list(kind), clip, total, foreach=True)


def build_mesh(shard: int, device: str) -> DeviceMesh:
    """The mesh (replicate, shard) of all ranks."""
    size = current_ranks().size
    if size % shard:
        allowed = ", ".join(str(one) for one in range(1, size + 1) if size % one == 0)
        raise UserError(f"shard is {shard}, and there are {size} ranks; allowed: {allowed}")
    shape = (size // shard, shard)
    kind = torch.device(device).type
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Spread the experts of all layers over ``mesh``, whole experts on a rank; their parameters."""
    sharded = set()
    for layer in model.modules():
        if not isinstance(layer, MoEFeedForward):
            continue
        experts = layer.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
            setattr(experts, name, nn.Parameter(spread, parameter.requires_grad))
        sharded |= set(experts.parameters())
        layer.sharded_experts = ShardedExperts(experts, mesh)
    return sharded


def check_expert_parallel(model: nn.Module, settings: Training) -> None:
    """Raise UserError where experts cannot be spread as asked."""
    number = settings.expert_parallel
    if number == 1:
        return
    if number != settings.shard:
        problem = f"expert_parallel is {number}, and shard is {settings.shard}"
        raise UserError(f"{problem}; allowed: 1, or both the same")
    for layer in model.modules():
        experts = len(next(layer.experts.parameters())) if isinstance(layer, MoEFeedForward) else 0
        if experts % number:
            problem = f"expert_parallel is {number}, and a layer has {experts} experts"
            raise UserError(f"{problem}; allowed: 1, or a divisor of these")
        if getattr(getattr(layer, "router", None), "merges_experts", False):
            problem = f"expert_parallel is {number}, and the router merges experts of all ranks"
            raise UserError(f"{problem}; allowed: 1, or another router")
        dropout = getattr(getattr(layer, "experts", None), "dropout", 0)
        if dropout:
            problem = f"expert_parallel is {number}, and experts.dropout {dropout}"
            raise UserError(f"{problem}; allowed: 1, or experts without dropout")


def check_rank_batches(model: nn.Module, batch: int) -> None:
    """Raise UserError where ranks would have unequally many images, or split groups."""
    current_ranks().rows(batch)
    size = current_ranks().size
    for module in model.modules():
        group = getattr(module, "training_group", 1)
        if (batch // size) % group:
            problem = f"group_size is {group}, and each of {size} ranks has {batch // size} images"
            raise UserError(
                f"{problem}; allowed: a divisor of these, or a batch that {group} divides"
            )
