"""The laws of mixture-of-experts layers, for our layers and for those that adapters describe.

A law is a function of a target, a layer of it with random weights, and tokens (B, T, d). It raises
AssertionError where the layer breaks it and NotPromised where the target states another convention.
"""

import copy
import math
import os
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from moecore.conformance.targets import (
    Target,
    assert_close,
    assert_equal,
    build_layer,
    call_adapter,
    draw_tokens,
    expert_slices,
    has_same_state,
    is_below,
    require_promise,
    router_parameters,
    run_layer,
    run_loss,
    seeded_randn,
)
from moecore.core.files import UserError
from moecore.measure.routing_metrics import layer_metrics

RANKS = 2
NEAR = 0.03  # of the largest logit: 8 × 2⁻⁸, for factors and sums rounded to bf16
ROUNDED = 0.05  # of weights in bf16
SHIFT = 1e-4  # of outputs, in fp32 sums of another order
ROUTED = ("output", "weights", "chosen")
HALVES = ("loss and experts", "hide later tokens in training")  # of laws, also in not_promised

Check = Callable[[Target, nn.Module, Tensor], str | None]


class Law(NamedTuple):
    """A law: its statement, its source, and the check, which may return a note."""

    name: str
    statement: str
    source: str
    check: Check
    ranks: int  # processes that the check starts


LAWS: dict[str, Law] = {}


def state_law(statement: str, source: str, ranks: int = 1) -> Callable[[Check], Check]:
    """Return a decorator that adds a check to LAWS."""

    def register(check: Check) -> Check:
        name = check.__name__.replace("_", " ")
        LAWS[name] = Law(name, statement, source, check, ranks)
        return check

    return register


def check_law(law: Law, target: Target) -> str | None:
    """Check a law; AssertionError where it is broken, NotPromised where it does not apply."""
    if not __debug__:  # ``python -O`` removes the assertions: every law would hold
        raise UserError.at("python", found="-O", allowed="python without -O")
    unknown = sorted(set(target.not_promised).difference(LAWS, HALVES))
    if unknown:
        allowed = ", ".join([*LAWS, *HALVES])
        raise UserError.at("not_promised", found=", ".join(unknown), allowed=allowed)
    require_promise(law.name not in target.not_promised, target.not_promised.get(law.name, ""))
    return law.check(target, build_layer(target), draw_tokens(target))


@state_law("The layer is the sum of all experts, weighted, in gradients too", "arXiv 1701.06538")
def sum_weighted_experts(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    list_parts: Any = target.parts
    require_promise(list_parts is not None, "the adapter gives no experts' outputs")
    for training in (True, False):
        results = []
        for is_sum in (False, True):
            twin, leaf = copy.deepcopy(layer), tokens.clone().requires_grad_()
            outcome = run_layer(target, twin, leaf, training=training)
            output = outcome["output"]
            if is_sum:
                outputs, rest = list_parts(twin, leaf, outcome)
                weights = outcome["weights"][..., : outputs.shape[2]].unsqueeze(-1)
                output = (weights * outputs).sum(dim=2) + rest
            leaves = [leaf, *(weight for weight in twin.parameters() if weight.requires_grad)]
            projection = seeded_randn(*output.shape, seed=9)
            grads = torch.autograd.grad(output, leaves, projection, materialize_grads=True)
            results.append((output, *grads))
        for place, (first, second) in enumerate(zip(*results, strict=True)):
            where = ", in gradients too: one" if place else ": the output"
            promise = f"the layer is the sum of all experts, weighted by combine{where}"
            assert_close(first, second, promise)


@state_law("Gradients of output and loss reach the router, the loss's no expert", "AutoModel #1408")
def reach_the_router(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    parameters = router_parameters(target, layer)
    outcome = run_layer(target, layer, tokens, training=True)
    terms = [
        outcome[name].square().sum() for name in ("output", "probs", "load") if name in outcome
    ]
    total = torch.stack(terms).sum()
    gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
    assert all(each.isfinite().all() for each in gradients), "gradients of the router are finite"
    reached = any(each.any() for each in gradients)
    assert reached, "a gradient of the output or the record reaches the router"
    if "loss" in outcome:
        loss, *gradients = run_loss(target, layer, tokens)
        reached = any(each.any() for each in gradients)
        assert reached, "a gradient of the balance loss reaches the router"
        named = layer.named_parameters()
        experts = [weight for name, weight in named if is_below(name, target.networks)]
        gradients = torch.autograd.grad(loss, experts, materialize_grads=True)
        reached = "loss and experts" not in target.not_promised and any(g.any() for g in gradients)
        assert not reached, "no gradient of the balance loss reaches the experts"


@state_law("Evaluation draws no random number, changes no state and gives the same twice", "torch")
def repeat_evaluation(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    before, state = torch.get_rng_state(), copy.deepcopy(layer.eval().state_dict())
    first, second = (call_adapter(target, layer, tokens) for _ in range(2))
    is_drawn = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    assert not is_drawn, "evaluation draws no number"
    same = all(torch.equal(first[name], second[name]) for name in ("output", "weights"))
    assert same, "evaluation gives the same twice"
    assert has_same_state(layer, state), "evaluation changes no state"


@state_law("A sequence has the same outputs and routing in any batch", "vLLM, batch invariance")
def isolate_sequences(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    half = target.batch // 2
    outcome = run_layer(target, layer, tokens)
    expected = {name: outcome[name][:half] for name in ROUTED}
    promise = "in evaluation an image is routed the same in any batch"
    assert_equal(run_layer(target, layer, tokens[:half]), expected, promise, *ROUTED)


@state_law("Routing in bf16 and fp32 agrees, but for near ties", "vLLM PR 58076; sglang #39351")
def round_to_bf16(target: Target, layer: nn.Module, tokens: Tensor) -> str | None:
    tokens = tokens.bfloat16().float()
    plain = run_layer(target, layer, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = run_layer(target, layer, tokens)
        half = run_layer(target, layer, tokens.bfloat16()) if target.same_bits else {}
    if target.same_bits:
        promise = "under bf16 autocast the record equals fp32's (nn.kernels.grouped.full_precision)"
        for name in {"logits", "probs", "load", "chosen", "weights"} & plain.keys():
            assert torch.equal(rounded[name], plain[name]), f"{promise}: {name} differs"
            is_wide = half[name].dtype in (torch.float32, torch.bool)
            assert is_wide, f"the record of bf16 tokens is fp32: {name}"
        return None
    require_promise("logits" in plain and target.k, "no logits are exposed")
    ordered = plain["logits"].float().sort(dim=-1, descending=True).values
    margins = ordered[..., target.k - 1] - ordered[..., min(target.k, target.experts - 1)]
    flipped = (plain["chosen"] != rounded["chosen"]).any(dim=-1)
    wrong = int((flipped & (margins > NEAR * ordered.abs().max())).sum())
    assert not wrong, f"routing in bf16 agrees with fp32 but for near ties: {wrong} tokens do not"
    shift = (plain["weights"] - rounded["weights"].float())[~flipped].abs().max()
    assert shift < ROUNDED, f"weights in bf16 and fp32 agree: they differ by {shift:.3g}"
    return f"{int(flipped.sum())} near-tie flips of {flipped.numel()} tokens"


def train_layer(target: Target, layer: nn.Module, steps: range) -> None:
    """Train a layer for some steps, with tokens and noise that depend on the step alone."""
    for step in steps:
        outcome = run_layer(target, layer, draw_tokens(target, seed=100 + 10 * step), training=True)
        terms = [outcome[name] for name in ("output", "probs", "load", "loss") if name in outcome]
        parameters = [weight for weight in layer.parameters() if weight.requires_grad]
        loss = torch.stack([term.square().mean() for term in terms]).sum()
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
        if target.after_step is not None:
            target.after_step(layer, outcome)


@state_law("A training that resumes from a checkpoint ends with the same bits", "torch")
def restore_state(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    train_layer(target, layer, range(1))
    resumed = build_layer(target, seed=1)
    resumed.load_state_dict(copy.deepcopy(layer.state_dict()))
    for twin in (layer, resumed):
        train_layer(target, twin, range(1, 3))
    promise = "a training that is resumed from its state_dict ends with the same bits"
    assert has_same_state(layer, resumed.state_dict()), promise


@state_law("A causal router sees no later token", "Expert Choice, arXiv 2202.09368, §5")
def hide_later_tokens(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    require_promise(target.causal, "not stated to be causal")
    promise = "it says that it is causal: a later token, or another text, never moves a token"
    is_promised_in_training = "hide later tokens in training" not in target.not_promised
    for training in (False, True) if is_promised_in_training else (False,):
        expected = run_layer(target, layer, tokens, training=training)
        for place in (1, target.tokens // 2, target.tokens - 1):
            changed = tokens.clone()
            changed[0, place:] = -changed[0, place:]
            outcome = run_layer(target, layer, changed, training=training)
            for name in ROUTED:
                moved = (outcome[name].double() - expected[name].double()).abs() > SHIFT
                is_moved = moved[0, :place].any() or moved[1:].any()
                assert not is_moved, f"{promise}: {name}, from place {place} on"


@state_law("Splitting the batch changes no mean loss and no gradient", "Megatron-LM #3672, PR 5798")
def split_the_batch(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    require_promise(target.loss_mean, "the loss is stated as no mean")
    # A loss per sequence is the mean over parts; a loss per batch is equal for a doubled batch.
    is_twice = target.loss_mean == "batch"
    halves = [torch.cat([tokens, tokens])] if is_twice else tokens.chunk(2)
    parts = [run_loss(target, layer, half) for half in halves]
    for place, (whole, *pieces) in enumerate(
        zip(run_loss(target, layer, tokens), *parts, strict=True)
    ):
        promise = f"a mean over each {target.loss_mean} does not depend on how the batch is split"
        what = "a gradient" if place else f"the loss, {float(whole.detach()):.6g},"
        assert_close(whole, torch.stack(pieces).mean(dim=0), f"{promise}: {what}")


@state_law("Appended padding changes no token, no loss and no count", "torchtitan PR 4168")
def append_padding(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    require_promise(target.padded, "the layer takes no mask of padding")
    longer = torch.cat([tokens, seeded_randn(*tokens.shape, seed=3)], dim=1)
    is_padding = (torch.arange(longer.shape[1]) >= target.tokens).expand(target.batch, -1)
    for training in (False, True):
        outcome = run_layer(target, layer, longer, is_padding, training=training)
        nothing = is_padding[:, : target.tokens]
        expected = run_layer(target, layer, tokens, nothing, training=training)
        outcome |= {name: outcome[name][:, : target.tokens] for name in ("output", "weights")}
        names = ["output", "weights", *(["counts"] if "counts" in expected else [])]
        assert_equal(outcome, expected, "appended padding changes nothing", *names)


@state_law("Permuted tokens have permuted outputs and weights, and the same loss", "1701.06538")
def permute_tokens(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    outcome = run_layer(target, layer, tokens.flip(1))
    outcome |= {name: outcome[name].flip(1) for name in ROUTED}
    expected = run_layer(target, layer, tokens)
    assert_equal(outcome, expected, "permuted tokens are routed the same", *ROUTED)


@state_law("Permuted experts, with their rows of the router, give the same layer", "1701.06538")
def permute_experts(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    expected, twin = run_layer(target, layer, tokens), copy.deepcopy(layer)
    slices, sources = expert_slices(target, twin), expert_slices(target, layer)[::-1]
    require_promise(len(slices) == target.experts, "some experts have no network")
    has_rows = False
    for pair in zip(slices, sources, strict=True):
        for values, source in zip(*pair, strict=True):
            values.copy_(source)
    for name, values in twin.state_dict().items():
        if is_below(name, target.router) or name == target.selection_bias:
            axes = [axis for axis, size in enumerate(values.shape) if size == target.experts]
            has_rows |= bool(axes) and name != target.selection_bias
            values.copy_(values.flip(axes))
    require_promise(has_rows, "the router has no row per expert")
    outcome = run_layer(target, twin, tokens)
    outcome["weights"] = outcome["weights"].flip(-1)
    assert_equal(outcome, expected, "permuted experts give the same layer", "output", "weights")


@state_law("Recomputed activations change no output, gradient or state", "torchtitan, moe.py, TODO")
def recompute_activations(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    promise = "recomputing activations in the backward pass changes nothing"

    def compute(values: Tensor, twin: nn.Module) -> Tensor:
        outcome = call_adapter(target, twin, values)
        total = outcome["output"].square().mean()
        return total if outcome.get("loss") is None else total + outcome["loss"]

    results: list[dict[str, Any]] = []
    for run in (compute, partial(checkpoint, compute, use_reentrant=False)):
        twin, leaf = copy.deepcopy(layer).train(), tokens.clone().requires_grad_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            loss = run(leaf, twin)
        try:
            loss.backward()
        except CheckpointError:
            raise AssertionError(f"{promise}: tensors have other shapes") from None
        gradients = {f"the gradient of {name}": each.grad for name, each in twin.named_parameters()}
        results.append({"the loss": loss, **gradients, **dict(twin.named_buffers())})
    for name, plain in results[0].items():
        if plain is not None:
            assert_close(results[1][name], plain, f"{promise}: {name}")


@state_law("Weights and counts are of the tokens that experts process", "Megatron-LM #7452")
def count_dispatched_tokens(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    # An expert's parameters change exactly the outputs of the tokens that have a weight for it.
    for training in (False, True) if target.loss_in_training else (False,):
        outcome = run_layer(target, copy.deepcopy(layer), tokens, training=training)
        reached = []
        for expert in range(len(expert_slices(target, layer))):
            twin = copy.deepcopy(layer)
            for values in expert_slices(target, twin)[expert]:
                values.copy_(0.25 - 1.5 * values)
            changed = run_layer(target, twin, tokens, training=training)["output"]
            reached.append((changed != outcome["output"]).any(dim=-1))
        is_used = outcome["weights"] != 0
        wrong = int((torch.stack(reached, dim=-1) != is_used[..., : len(reached)]).sum())
        assert not wrong, f"weights are of the tokens that experts process: {wrong} are not"
        if "counts" in outcome:
            expected, counts = outcome["chosen"].flatten(0, -2).sum(dim=0), outcome["counts"].long()
            promise = f"the counts are of the chosen experts, {expected.tolist()}"
            assert torch.equal(counts, expected), f"{promise}: {counts.tolist()}"


@state_law("A token's weights are the stated function of its logits", "V-MoE, §2; mlx-lm PR 1354")
def normalise_weights(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    outcome = run_layer(target, layer, tokens)
    chosen, weights = outcome["chosen"], outcome["weights"].float()
    counts = chosen.sum(dim=-1).unique().tolist()
    assert target.k is None or counts == [target.k], f"a token has {target.k} experts: {counts}"
    require_promise(target.score and "logits" in outcome, "no logits are exposed")
    activation = torch.sigmoid if target.score == "sigmoid" else partial(torch.softmax, dim=-1)
    scores = activation(outcome["logits"].float())
    expected = scores * chosen * target.scale
    if target.weights_sum is not None:
        expected = expected / expected.sum(dim=-1, keepdim=True) * target.weights_sum
    # of a dropped choice 0; the others are not scaled
    promise = f"the weights are the {target.score} of the logits, as stated: the weight"
    assert_close(weights, expected * (weights != 0), promise)
    lowest = scores.where(chosen, torch.inf).amin(dim=-1)
    is_best = lowest >= scores.where(~chosen, -torch.inf).amax(dim=-1)
    is_promised = target.selection_bias is None and target.k and target.k < target.experts
    assert is_best.all() or not is_promised, f"the {target.k} largest scores are chosen"


@state_law(
    "A selection bias changes the choice and no weight", "arXiv 2408.15664; torchtitan PR 2319"
)
def keep_bias_out_of_weights(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    name = target.selection_bias or ""
    require_promise(name, "no selection bias")
    bias = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}[name]
    plain: dict[str, Any] = {}
    for shift in (0.0, 3.0, -3.0):  # the same for all experts
        nn.init.constant_(bias, shift)
        outcome = run_layer(target, layer, tokens)
        plain = plain or outcome
        promise = f"a selection bias of {shift:g} for every expert changes nothing"
        assert_equal(outcome, plain, promise, "chosen", "weights")
    nn.init.zeros_(bias)
    is_same = torch.ones_like(plain["chosen"][..., 0])
    for shift in (0.2, 5.0):  # the second is enough where the bias is added to logits
        bias.data.flatten()[0] = shift
        if is_same.all():
            outcome = run_layer(target, layer, tokens)
            is_same = (outcome["chosen"] == plain["chosen"]).all(dim=-1)
    taken = plain["chosen"][..., 0] & ~outcome["chosen"][..., 0]
    assert not taken.any(), "a positive selection bias takes no token from its expert"
    assert not is_same.all(), "a selection bias changes the choice"
    promise = "a selection bias is in no weight: the weight"
    assert_close(outcome["weights"][is_same], plain["weights"][is_same], promise)


@state_law("Tied experts are chosen the same each time, k different ones", "V-MoE; vLLM #54730")
def break_ties(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    for parameter in router_parameters(target, layer):
        nn.init.zeros_(parameter)
    layer.eval()
    with torch.random.fork_rng(devices=[]):
        first, second = (call_adapter(target, layer, tokens)["weights"] for _ in range(2))
    assert torch.equal(first, second), "ties are broken the same each time"
    most = int((first != 0).sum(dim=-1).max())
    assert target.k is None or most <= target.k, f"a tied token has {target.k} experts: {most}"


@state_law("With equal probabilities the loss is as stated: 1, k or 0", "transformers #43688")
def sum_load_shares(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    even_loss: Any = target.even_loss
    require_promise(even_loss is not None, "no value of the loss is stated")
    for parameter in router_parameters(target, layer):
        nn.init.zeros_(parameter)
    loss = run_loss(target, layer, tokens)[0].item()
    promise = f"with equal probabilities the loss is {even_loss:g}"
    assert math.isclose(loss, even_loss, abs_tol=1e-4), f"{promise}: found {loss:.4g}"


@state_law("The loss is smaller at an even load, to which its gradient pushes", "Switch, §2.2")
def push_to_even_load(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    run_loss(target, layer, tokens)  # where there is one
    pool = seeded_randn(1, 64 * target.experts, target.width, seed=4)
    chosen = run_layer(target, layer, pool)["chosen"][0].double()
    counts = torch.zeros(target.experts, dtype=torch.float64)
    even: list[int] = []
    for _ in range(4 * target.experts):  # the token that leaves the load the most even
        unevenness = (counts + chosen).var(dim=-1, correction=0)
        unevenness[even] = torch.inf
        even.append(int(unevenness.argmin()))
        counts += chosen[even[-1]]
    heavy = int(chosen.sum(dim=0).argmax())
    # By weight: tokens that choose an expert of many with little weight can have a smaller loss.
    weights = run_layer(target, layer, pool)["weights"][0, :, heavy]
    skewed = pool[:, weights.argsort(descending=True, stable=True)[: len(even)]]
    loss = run_loss(target, layer, pool[:, even])[0]
    uneven_loss, *gradients = run_loss(target, layer, skewed)
    numbers = f"{loss:.4g} at an even load, {uneven_loss:.4g} at an uneven one"
    assert loss < uneven_loss, f"the loss is least at an even load: {numbers}"
    name = "probs" if "probs" in run_layer(target, layer, skewed) else "weights"
    before = run_layer(target, layer, skewed)[name][..., heavy].mean().item()
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    for parameter, gradient in zip(router_parameters(target, layer), gradients, strict=True):
        parameter.data -= 0.1 * gradient / max(norm, 1e-20)
    after = run_layer(target, layer, skewed)[name][..., heavy].mean().item()
    promise = f"a step down the gradient gives the busiest expert less: {name}"
    assert after < before, f"{promise} {before:.5g}, then {after:.5g}"


@state_law("Logged load statistics equal their definitions", "arXiv 2408.15664; vLLM PR 39178")
def log_load_statistics(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    outcome = run_layer(target, layer, tokens)
    require_promise(outcome.get("statistics"), "no statistics are logged")
    counts = outcome["chosen"].flatten(0, -2).sum(dim=0)
    violation = layer_metrics.max_load_violation(counts)
    expected = {"max_violation": violation, "balancedness": 1 / (1 + violation)}
    expected["entropy"] = layer_metrics.normalised_load_entropy(counts)  # in units of ln E
    for name, value in outcome["statistics"].items():
        is_right = math.isclose(value, expected[name], abs_tol=1e-5)
        assert is_right, f"{name} is as defined, {expected[name]:.6g}: found {value:.6g}"


def has_loss_of_whole_batch(target: Target) -> bool:
    """Return whether the mean of the ranks' losses equals the loss of the whole batch."""
    return target.loss_mean == "sequence" or target.reduces_ranks


def run_rank(rank: int, target: Target, folder: str) -> None:
    """Store this rank's gradients for its part of the batch, and its state after a step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # ranks meet on this machine only
    store = distributed.FileStore(f"{folder}/meeting", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    layer, part = build_layer(target), draw_tokens(target).chunk(RANKS)[rank]
    gradients = run_loss(target, layer, part)[1:] if has_loss_of_whole_batch(target) else []
    outcome = run_layer(target, layer, part, training=True)
    if target.after_step is not None:
        target.after_step(layer, outcome)
    for name, tensors in (("gradient", gradients), ("state", layer.buffers())):
        flat = torch.cat([torch.zeros(1), *(values.float().flatten() for values in tensors)])
        np.save(f"{folder}/{name}{rank}.npy", flat.numpy())
    distributed.destroy_process_group()


@state_law(
    "Two ranks have the gradient of the whole batch, and one state", "Megatron-LM #7452", RANKS
)
def agree_over_ranks(target: Target, layer: nn.Module, tokens: Tensor) -> None:
    has_bias = target.selection_bias is not None and target.after_step is not None
    is_stated = has_loss_of_whole_batch(target)
    require_promise(is_stated or has_bias, "the loss is of each rank's own tokens")
    if distributed.is_initialized():
        ranks = f"a process group of {distributed.get_world_size()}"
        raise UserError.at("ranks", found=ranks, allowed=f"none: the law starts {RANKS} processes")
    gradients = run_loss(target, layer, tokens)[1:] if is_stated else []
    expected = torch.cat([torch.zeros(1), *(gradient.flatten() for gradient in gradients)])
    with TemporaryDirectory() as folder:
        start = torch.multiprocessing.start_processes
        start(run_rank, (target, folder), nprocs=RANKS, start_method="fork")
        names = [f"{folder}/{name}{rank}.npy" for name in ("gradient", "state") for rank in (0, 1)]
        first, second, *states = (torch.from_numpy(np.load(name)) for name in names)
    promise = "the mean of the ranks' gradients is the gradient of the whole batch: it"
    assert_close((first + second) / RANKS, expected, promise)
    assert torch.equal(*states), "both ranks have the same state after a step"
