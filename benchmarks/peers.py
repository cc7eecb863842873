"""The peers' layers, each set to do what ours does: equal k, equal width of the experts, nothing
dropped where the peer can.

A builder raises Unfit, with the reason, where a peer cannot take a size.
"""

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from benchmarks import layers
from benchmarks.layers import Size
from moecore.training.teachers.timm import define_missing_operators


class Unfit(Exception):
    """The peer does not support this size; the message says why."""


class Peer(NamedTuple):
    """A layer of another library, and the layer of ours that is raced against it."""

    name: str
    module: str  # the module that it needs
    build: Callable[[Size], nn.Module]
    ours: Callable[[Size], nn.Module]
    note: str  # how its work differs from ours
    # True: bf16 parameters, also in our layer, as its grouped_mm does not support autocast
    parameters: bool = False

    @property
    def missing(self) -> bool:
        return find_spec(self.module) is None


def transformers_experts(implementation: str) -> Callable[[Size], nn.Module]:
    """Mixtral's sparse block with one of transformers' experts implementations."""

    def build(size: Size) -> nn.Module:
        define_missing_operators()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(
            hidden_size=size.width,
            intermediate_size=size.gated,
            num_local_experts=size.experts,
            num_experts_per_tok=size.k,
            hidden_act="silu",
        )
        config._experts_implementation = implementation
        layer = MixtralSparseMoeBlock(config)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.02)
        return layer

    return build


def st_moe(size: Size) -> nn.Module:
    """st-moe-pytorch: a dispatch tensor of (image, token, expert, seat)."""
    from st_moe_pytorch import MoE

    _needs_two(size, "st-moe-pytorch")
    return _roomy(
        MoE(
            dim=size.width,
            num_experts=size.experts,
            gating_top_n=size.k,
            expert_hidden_mult=size.hidden / size.width,
            threshold_train=0.0,
        ),
        size,
    )


def mixture_of_experts(size: Size) -> nn.Module:
    """mixture-of-experts, with GELU: a dispatch tensor of (image, token, expert, seat)."""
    from mixture_of_experts import MoE

    _needs_two(size, "mixture-of-experts")
    return _roomy(
        MoE(
            dim=size.width,
            num_experts=size.experts,
            hidden_dim=size.hidden,
            activation=nn.GELU,
            second_policy_train="all",
        ),
        size,
    )


def soft_moe(size: Size) -> nn.Module:
    """soft-moe-pytorch with as many slots as ours."""
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(
        size.width,
        num_experts=size.experts,
        num_slots=size.slots,
        expert_mult=size.hidden / size.width,
        offload_unused_experts_to_cpu=False,
    )


def deepspeed(size: Size) -> nn.Module:
    """DeepSpeed's layer on one process (gloo), without its compiled operators."""
    if size.k > 2:
        raise Unfit("deepspeed races with k = 1 or 2")
    _one_process()
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.moe.layer import MoE

        expert = nn.Sequential(
            nn.Linear(size.width, size.hidden), nn.GELU(), nn.Linear(size.hidden, size.width)
        )
        options = {
            "drop_tokens": False,
            "use_rts": False,
            "top2_2nd_expert_sampling": False,
            "min_capacity": 0,
        }
        layer = MoE(size.width, expert, num_experts=size.experts, k=size.k, **options)
        layer.set_deepspeed_parallelism()
    return layer


class Scattered(nn.Module):
    """ScatterMoE's SwiGLU experts below a linear router whose chosen gates sum to 1."""

    def __init__(self, size: Size) -> None:
        from scattermoe.mlp import GLUMLP

        super().__init__()
        self.k = size.k
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = GLUMLP(size.width, size.gated, size.experts, size.k, activation=nn.SiLU())

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens.flatten(0, 1)
        gates = torch.softmax(self.router(rows).float(), dim=-1)
        weights, chosen = gates.topk(self.k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(rows, weights.to(rows.dtype), chosen).view_as(tokens)


def megablocks(size: Size) -> nn.Module:
    """MegaBlocks' dropless layer with GELU, without biases and without its balance loss.

    Its own products of blocks, or grouped_gemm's where that is installed.
    """
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    options = Arguments(
        hidden_size=size.width,
        ffn_hidden_size=size.hidden,
        moe_num_experts=size.experts,
        moe_top_k=size.k,
        moe_normalize_expert_weights=1,
        moe_loss_weight=0,
        mlp_impl="sparse" if find_spec("grouped_gemm") is None else "grouped",
        activation_fn=nn.functional.gelu,
        bias=False,
        return_bias=False,
        fp16=False,
        bf16=True,
    )
    return dMoE(options)


def sonic_moe(size: Size) -> nn.Module:
    """SonicMoE's layer with SwiGLU; it needs a Hopper or Blackwell GPU."""
    from sonicmoe import MoE
    from sonicmoe.enums import ActivationType

    return MoE(
        num_experts=size.experts,
        num_experts_per_tok=size.k,
        hidden_size=size.width,
        intermediate_size=size.gated,
        activation_function=ActivationType.SWIGLU,
        add_bias=False,
        std=0.02,
    )


def _needs_two(size: Size, peer: str) -> None:
    if size.k != 2:
        raise Unfit(f"{peer} has no k = {size.k}")


def _roomy(layer: nn.Module, size: Size) -> nn.Module:
    """Set the least capacity that drops no token, in steps of a quarter of an even share."""
    tokens = layers.tokens_of(size)
    gate = layer.gate
    share = 1.0
    with torch.no_grad():
        while True:
            gate.capacity_factor_train = share * size.k
            if (gate(tokens)[0] > 0).sum() == size.images * size.tokens * size.k:
                return layer
            share += 0.25
            if share > size.experts:
                raise RuntimeError("tokens are dropped although every expert has room for each")


def _one_process() -> None:
    """Start a process group of one process, which DeepSpeed's layer needs."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not distributed.is_initialized():
        place = Path(tempfile.mkdtemp()) / "store"
        distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed as package

        package.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def leave_group() -> None:
    """End the process group that DeepSpeed's layer needed; it cannot be built again after that."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


ROOMY = (
    "every expert has the capacity per image that its fullest one needs, so that nothing is "
    "dropped, and computes all of it"
)
SWIGLU = "SwiGLU; bf16 parameters on both sides"
PEERS = (
    Peer(
        "transformers grouped_mm",
        "transformers",
        transformers_experts("grouped_mm"),
        layers.ours_swiglu,
        SWIGLU,
        True,
    ),
    Peer(
        "transformers eager",
        "transformers",
        transformers_experts("eager"),
        layers.ours_swiglu,
        SWIGLU,
        True,
    ),
    Peer("st-moe-pytorch", "st_moe_pytorch", st_moe, layers.ours_geglu, f"GEGLU; {ROOMY}"),
    Peer(
        "mixture-of-experts",
        "mixture_of_experts",
        mixture_of_experts,
        layers.ours,
        f"no biases; {ROOMY}",
    ),
    Peer("soft-moe-pytorch", "soft_moe_pytorch", soft_moe, layers.ours_soft, "equal slots"),
    Peer(
        "DeepSpeed",
        "deepspeed",
        deepspeed,
        layers.ours,
        "one process, operators not compiled; all experts have the capacity of the fullest one",
    ),
)

GPU_PEERS = (  # that no CPU runs, and transformers
    PEERS[0],
    Peer("ScatterMoE", "scattermoe", Scattered, layers.ours_swiglu, SWIGLU, True),
    Peer("MegaBlocks", "megablocks", megablocks, layers.ours, "no biases; bf16 parameters", True),
    Peer("SonicMoE", "sonicmoe", sonic_moe, layers.ours_swiglu, SWIGLU, True),
)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a precision, "float32" or "bfloat16"."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
