"""Every adapter, run against a stub of its library's published interface: none is installed here.

S tokens, E experts, k per token. The stubs route with plain torch, so that every law holds.
"""

import ast
import importlib.metadata
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from moecore.conformance.laws import LAWS, check_law
from moecore.core.files import UserError
from moecore.pipeline.conform import find_targets, judge_and_write_failures
from tests.project import ROOT

ADAPTERS = ROOT / "conformance/adapters"
HELPERS = ("family_blocks", "megatron_layer")  # parts that adapters share


def route(logits, k=2, score="softmax", bias=0.0, sums=True):
    """Return scores, weights (S, E) and ids (S, k) of the k largest scores plus bias."""
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(dim=-1)
    ids = (scores + bias).topk(k, dim=-1).indices
    weights = scores * torch.zeros_like(scores).scatter(-1, ids, 1.0)
    return scores, weights / weights.sum(-1, keepdim=True) if sums else weights, ids


def balance(scores, weights, group=None):
    """Return Switch's loss, a mean over sequences; tokens whose scores are 0 are padding."""
    counts = (weights != 0).to(scores.dtype).sum(dim=-2)
    total = scores.detach().sum(dim=(-2, -1))
    if group is not None and group.size() > 1:
        distributed.all_reduce(counts, group=group)
        distributed.all_reduce(total, group=group)
    shares, probs = counts / counts.sum(-1, keepdim=True), scores.sum(dim=-2) / total.unsqueeze(-1)
    return scores.shape[-1] * (shares * probs).sum(dim=-1).mean()


def combine(experts, tokens, weights):
    return sum(weights[..., e, None] * expert(tokens) for e, expert in enumerate(experts))


class AddLoss(torch.autograd.Function):
    """Add the gradient of a loss to the backward pass of a tensor."""

    main_loss_backward_scale = 1.0

    @staticmethod
    def forward(ctx, tensor, loss):
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.as_tensor(float(AddLoss.main_loss_backward_scale))


class Gate(nn.Module):
    """A linear gate, whose weight the libraries call by several names."""

    def __init__(self, width=12, experts=4):
        super().__init__()
        self.wg = nn.Linear(width, experts, bias=False)
        nn.init.normal_(self.wg.weight, std=0.5)


def make_experts(number=4):
    return nn.ModuleList(nn.Linear(12, 12) for _ in range(number))


def stub_fairscale():
    class Top2Gate(Gate):
        def forward(self, tokens):
            scores, weights, ids = route(self.wg(tokens))
            loss = balance(scores, torch.zeros_like(scores).scatter(-1, ids[:, :1], 1.0)) / 16
            return loss, weights.unsqueeze(-1), (weights != 0).unsqueeze(-1)

    class MOELayer(nn.Module):
        def __init__(self, gate, experts, group=None):
            super().__init__()
            self.gate, self.experts, self.group = gate, experts, group
            assert group.size() == 1

        def forward(self, tokens):
            assert len(tokens) % len(self.experts) == 0
            flat = tokens.flatten(0, 1)
            self.l_aux, weights, _ = self.gate(flat)
            buffers = flat.expand(len(self.experts), *flat.shape).contiguous()
            sent = torch.empty_like(buffers)
            distributed.all_to_all_single(sent, buffers, group=self.group)
            return combine(self.experts, sent[0], weights.sum(-1)).view_as(tokens)

    return {"fairscale.nn.moe": {"MOELayer": MOELayer, "Top2Gate": Top2Gate}}


def stub_deepspeed():
    class TopKGate(Gate):
        def __init__(self, model_dim, num_experts, k=1, drop_tokens=True, **options):
            super().__init__(model_dim, num_experts)
            self.k, self.drop_tokens = k, drop_tokens

        def forward(self, tokens, used_token=None, sparse_routes=False):
            scores, weights, ids = route(self.wg(tokens.float()), self.k, sums=self.k > 1)
            loss, counts = balance(scores, weights), (weights != 0).sum(0)
            return loss, 0, 4, ids.T, ids.T, weights.gather(-1, ids).T, counts

    class Experts(nn.Module):
        def __init__(self, expert, num_local_experts):
            super().__init__()
            self.deepspeed_experts = make_experts(num_local_experts)

    class MOELayer(nn.Module):
        def __init__(self, gate, experts, ep_group_name, ep_size, num_local_experts):
            super().__init__()
            self.gate, self.experts = gate, experts

        def forward(self, tokens, used_token):
            self.l_aux, _, _, ids, _, gates, self.exp_counts = self.gate(tokens.flatten(0, 1))
            weights = torch.zeros(ids.shape[1], 4).scatter(-1, ids.T, gates.T.float())
            weights = weights.view(*tokens.shape[:2], 4)
            return combine(self.experts.deepspeed_experts, tokens, weights)

    return {
        "deepspeed.moe.experts": {"Experts": Experts},
        "deepspeed.moe.sharded_moe": {"MOELayer": MOELayer, "TopKGate": TopKGate},
    }


def stub_olmo_core():
    class MoELinearRouter(nn.Module):
        def __init__(self, d_model, num_experts, top_k, lb_loss_granularity, **options):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(num_experts * d_model))
            self.register_buffer("score_bias", torch.zeros(num_experts))
            self.over, self.counts = lb_loss_granularity, torch.zeros(num_experts)

        def reset_parameters(self):
            self.score_bias.zero_()

        def get_expert_logits(self, tokens):
            return tokens @ self.weight.view(-1, tokens.shape[-1]).T

        def forward(self, tokens):
            scores, weights, ids = route(
                self.get_expert_logits(tokens).float(), bias=self.score_bias
            )
            counts = (weights != 0).flatten(0, 1).sum(0)
            self.counts = self.counts + counts
            pair = scores, weights
            if self.over == "local_batch":
                pair = scores.flatten(0, 1), weights.flatten(0, 1)
            return weights.gather(-1, ids), ids, counts, balance(*pair) if self.training else None

        def post_batch(self):
            if distributed.is_initialized():
                distributed.all_reduce(self.counts)
            self.score_bias += 0.01 * (self.counts.mean() - self.counts).sign()
            self.counts = torch.zeros_like(self.counts)

    return {"olmo_core.nn.moe.router": {"MoELinearRouter": MoELinearRouter}}


def stub_torchtitan():
    class MoE(nn.Module):
        def __init__(self, args, dim, hidden_dim):
            super().__init__()
            self.router = nn.Module()
            self.router.gate = nn.Linear(dim, args.num_experts, bias=False)
            self.router.forward = self.route_tokens
            self.experts = make_experts(args.num_experts)
            self.register_buffer("expert_bias", torch.zeros(args.num_experts))
            self.register_buffer("tokens_per_expert", torch.zeros(4), persistent=False)

        def __deepcopy__(self, memo):
            twin = MoE(SimpleNamespace(num_experts=4), 12, 10)
            twin.load_state_dict(self.state_dict())
            return twin.train(self.training)

        def route_tokens(self, tokens, bias):
            _, weights, ids = route(self.router.gate(tokens).float(), score="sigmoid", bias=bias)
            return weights.gather(-1, ids), ids, torch.histc(ids, bins=4, min=0, max=4)

        def forward(self, tokens):
            top, ids, counts = self.route_tokens(tokens.flatten(0, 1), self.expert_bias)
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
            weights = torch.zeros(len(ids), 4).scatter(-1, ids, top).view(*tokens.shape[:2], 4)
            return combine(self.experts, tokens, weights)

    return {"torchtitan.models.moe.moe": {"MoE": MoE, "MoEArgs": SimpleNamespace}}


def stub_automodel():
    class BiasedGate(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.weight, self.config = nn.Parameter(torch.empty(8, config.dim)), config
            self.register_buffer("e_score_correction_bias", torch.zeros(8))

        def forward(self, tokens, mask, mesh):
            logits, bias = tokens @ self.weight.T, self.e_score_correction_bias
            scores, weights, ids = route(logits.float(), score=self.config.score_func, bias=bias)
            top = weights.gather(-1, ids)
            if not self.training or not self.config.aux_loss_coeff:
                return top, ids, None
            loss = balance(scores[mask], weights[mask])
            return AddLoss.apply(top, loss), ids, loss

        def update_bias(self):
            self.e_score_correction_bias += 0.01

    class MoE(nn.Module):
        def __init__(self, config, backend):
            super().__init__()
            self.gate, self.experts = BiasedGate(config), make_experts(8)

        def forward(self, tokens, padding_mask=None):
            flat = tokens.flatten(0, 1)
            mask = torch.ones(len(flat), dtype=torch.bool)
            mask = mask if padding_mask is None else ~padding_mask.flatten()
            top, ids, _ = self.gate(flat, mask, None)
            weights = torch.zeros(len(flat), 8).scatter(-1, ids, top)
            return combine(self.experts, flat, weights).view_as(tokens)

    names = {"MoE": MoE, "MoEConfig": SimpleNamespace, "BackendConfig": SimpleNamespace}
    return {"nemo_automodel.components.moe.layers": names}


def stub_lucidrains():
    class SequenceGate(Gate):
        def forward(self, tokens):
            scores, weights, _ = route(self.wg(tokens).float())
            return weights.unsqueeze(-1) != 0, weights.unsqueeze(-1), balance(scores, weights)

    class First(SequenceGate):  # of mixture-of-experts
        @property
        def w_gating(self):
            return self.wg.weight.T

    class Second(SequenceGate):  # of st-moe-pytorch
        def to_gates(self, tokens):
            return self.wg(tokens)

        def forward(self, tokens):
            return *super().forward(tokens), 0.0

    class MoE(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.gate, self.experts = First(), make_experts()

        def forward(self, tokens):
            _, weights, loss = self.gate(tokens)
            return combine(self.experts, tokens, weights.sum(-1)), loss

    class SparseMoE(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.gate, self.experts = Second(), nn.ModuleDict({"experts": make_experts()})

        def forward(self, tokens):
            _, weights, loss, z_loss = self.gate(tokens)
            return combine(self.experts["experts"], tokens, weights.sum(-1)), loss, loss, z_loss

    class SoftMoE(nn.Module):
        def __init__(self, dim, num_experts, num_slots, **options):
            super().__init__()
            self.slot_embeds = nn.Parameter(torch.randn(num_experts, num_slots, dim))
            self.norm, self.slot_norm = nn.Identity(), nn.Identity()
            self.experts = nn.ModuleDict({"experts": make_experts(num_experts)})

        def forward(self, tokens, mask=None):
            logits = torch.einsum("bnd,esd->bnes", tokens, self.slot_embeds)
            if mask is not None:
                logits = logits.masked_fill(~mask[..., None, None], -torch.inf)
            slots = torch.einsum("bnes,bnd->besd", logits.softmax(1), tokens)
            experts = enumerate(self.experts["experts"])
            outputs = torch.stack([expert(slots[:, e]) for e, expert in experts], dim=1)
            weights = logits.flatten(2).softmax(-1).view_as(logits)
            return torch.einsum("bnes,besd->bnd", weights.nan_to_num(), outputs)

    return {
        "mixture_of_experts": {"MoE": MoE},
        "st_moe_pytorch": {"MoE": SparseMoE},
        "soft_moe_pytorch": {"SoftMoE": SoftMoE},
    }


def stub_megatron():
    def score_tokens(logits, topk, score_function, padding_mask=None):
        scores, weights, _ = route(logits.float(), score=score_function)
        is_token = torch.ones(len(logits), 1) if padding_mask is None else ~padding_mask[:, None]
        return (weights != 0) & is_token.bool(), scores / scores.sum(-1, keepdim=True) * is_token

    class TopKRouter(nn.Module):
        def __init__(self, config, groups):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 12))
            self.config, self.tp_cp_group = config, groups.tp_cp
            self.score_function = getattr(config, "moe_router_score_function", "softmax")
            self.calculate_per_token_loss = getattr(config, "calculate_per_token_loss", False)
            self.register_buffer("expert_bias", torch.zeros(8))

        def gating(self, tokens):
            return tokens @ self.weight.T

        def attach_and_log_load_balancing_loss(self, probs, coefficient, loss):
            tokens = len(probs) * self.tp_cp_group.size()  # Megatron-LM PR 5047
            return AddLoss.apply(probs, loss * (tokens if self.calculate_per_token_loss else 1))

        def forward(self, tokens, padding_mask):
            logits = self.gating(tokens).float()
            is_first = getattr(self.config, "moe_router_pre_softmax", False)
            options = {"score": self.score_function, "bias": self.expert_bias, "sums": not is_first}
            scores, weights, _ = route(logits.flatten(0, 1), **options)
            mask = None if padding_mask is None else padding_mask.T.flatten()
            counted, scores = score_tokens(logits.flatten(0, 1), 2, self.score_function, mask)
            if self.training:
                pair = scores, counted
                if getattr(self.config, "moe_router_load_balancing_type", "") == "seq_aux_loss":
                    size = logits.shape[:2]
                    pair = [value.unflatten(0, size).transpose(0, 1) for value in pair]
                loss = balance(*pair, group=self.tp_cp_group)
                weights = self.attach_and_log_load_balancing_loss(weights, 1.0, loss)
            return weights, weights != 0

    class MoELayer(nn.Module):
        def __init__(self, config, submodules, layer_number, groups):
            super().__init__()
            self.router, self.experts = TopKRouter(config, groups), nn.Module()
            self.experts.local_experts = make_experts(8)
            self.token_dispatcher = SimpleNamespace()

        def forward(self, tokens, padding_mask=None):
            weights, _ = self.router(tokens, padding_mask)
            flat = combine(self.experts.local_experts, tokens.flatten(0, 1), weights)
            return flat.view_as(tokens), None

    moe = "megatron.core.transformer.moe"
    return {
        "megatron.core.models.gpt.moe_module_specs": {
            "get_moe_module_spec": lambda *options: SimpleNamespace(submodules=None)
        },
        "megatron.core.tensor_parallel.mappings": {},
        f"{moe}.moe_layer": {"MoELayer": MoELayer, "TransformerConfig": SimpleNamespace},
        f"{moe}.moe_utils": {
            "MoEAuxLossAutoScaler": AddLoss,
            "compute_routing_scores_for_aux_loss": score_tokens,
        },
    }


def stub_mlx():
    class Lfm2MoeSparseMoeBlock:
        def __init__(self, args):
            names = ("gate_proj", "up_proj", "down_proj")
            self.projections = {name: SimpleNamespace() for name in names}
            self.gate, self.switch_mlp = SimpleNamespace(), self.projections

        def __call__(self, tokens):
            logits = tokens @ self.gate.weight.T
            _, weights, ids = route(logits, score="sigmoid", bias=self.expert_bias)
            if callable(self.switch_mlp):
                outputs = self.switch_mlp(tokens, ids)
            else:
                gate, up, down = (part.weight[ids] for part in self.projections.values())
                columns = tokens[:, :, None, :, None]
                outputs = (down @ ((gate @ columns).sigmoid() * (up @ columns))).squeeze(-1)
            return (outputs * weights.gather(-1, ids).unsqueeze(-1)).sum(-2).numpy()

    core = {"array": torch.from_numpy, "eye": torch.eye}
    block = {"Lfm2MoeSparseMoeBlock": Lfm2MoeSparseMoeBlock}
    return {"mlx.core": core, "mlx_lm.models.lfm2_moe": block}


STUBS = {
    "automodel": stub_automodel,
    "megatron_core": stub_megatron,
    "megatron_options": stub_megatron,
    "mixture": stub_lucidrains,
    "mlx_lfm2": stub_mlx,
    "olmo": stub_olmo_core,
    "scale": stub_fairscale,
    "soft_moe": stub_lucidrains,
    "speed": stub_deepspeed,
    "st_moe": stub_lucidrains,
    "titan": stub_torchtitan,
}
FAILS = {  # of the stubs, too: what the library documents
    "titan": {("torchtitan", "recompute activations")}
}


@pytest.fixture
def install(monkeypatch):
    """Return a function that makes modules importable; adapters' changes of torch end with it."""
    for owner, name in (
        (distributed, "all_to_all_single"),
        (torch, "histc"),
        (torch.cuda, "current_device"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(sys, "path", [*sys.path, str(ADAPTERS)])

    def install_modules(modules):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
        for path, names in modules.items():
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules or end == len(parts):
                    monkeypatch.setitem(sys.modules, name, ModuleType(name))
                if end > 1:
                    parent = sys.modules[".".join(parts[: end - 1])]
                    monkeypatch.setattr(parent, parts[end - 1], sys.modules[name], raising=False)
            vars(sys.modules[path]).update(names)

    return install_modules


@pytest.mark.parametrize("adapter", STUBS)
def test_an_adapter_runs_every_law_against_its_librarys_interface(adapter, install, tmp_path):
    install(STUBS[adapter]())
    for target in find_targets(f"{ADAPTERS / adapter}.py"):
        verdicts = judge_and_write_failures(target, tmp_path)["verdicts"]
        others = [each for each in verdicts if each["status"] == "not run"]
        assert not others
        failed = {(target.name, each["law"]) for each in verdicts if each["status"] == "fails"}
        assert failed == FAILS.get(adapter, set()), verdicts
        assert sum(each["status"] == "holds" for each in verdicts) >= 6


def test_every_adapter_has_at_most_30_lines_of_code():
    for path in ADAPTERS.glob("*.py"):
        if path.stem not in HELPERS:
            text = path.read_text("utf-8")
            code = text.splitlines()[ast.parse(text).body[0].end_lineno :]  # after the docstring
            assert sum(bool(line.strip()) for line in code) <= 30, path
            assert path.stem in (*STUBS, "hf_families", "hf_mixtral")


def test_a_family_of_transformers_and_one_that_cannot_be_built(install, monkeypatch, tmp_path):
    monkeypatch.setenv("FAMILIES", "olmoe")
    (target,) = find_targets(f"{ADAPTERS / 'hf_families'}.py")
    verdicts = {
        each["law"]: each for each in judge_and_write_failures(target, tmp_path)["verdicts"]
    }
    failed = [law for law, each in verdicts.items() if each["status"] == "fails"]
    assert failed == ["sum load shares"]
    import family_blocks

    refused = family_blocks.refuse_family("new", "NewModel: ValueError: no width")
    for each in judge_and_write_failures(refused, tmp_path)["verdicts"]:
        assert each["status"] == "not run" and "NewModel: ValueError: no width" in each["note"]


def test_reproductions_have_at_most_20_lines_and_no_moecore():
    scripts = list((ROOT / "conformance/findings").glob("*.py"))
    for script in scripts:
        text = script.read_text("utf-8")
        ast.parse(text)
        assert len(text.splitlines()) <= 20 and "moecore" not in text, script
    page = (ROOT / "conformance/README.md").read_text("utf-8")
    assert set(re.findall(r"\(findings/(.*?\.py)\)", page)) == {path.name for path in scripts}


def test_a_law_of_two_ranks_names_a_process_group_of_one(monkeypatch, install):
    install(stub_olmo_core())
    target = find_targets(f"{ADAPTERS / 'olmo'}.py")[0]
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    with pytest.raises(UserError, match="ranks: found a process group of 1; allowed: none"):
        check_law(LAWS["agree over ranks"], target)
    check_law(LAWS["permute tokens"], target)
