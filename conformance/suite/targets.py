"""What the laws see of a mixture-of-experts layer of any library, and how they run it.

B sequences or images, T tokens each, d width, E experts, N of them with parameters.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moecore.core.files import UserError

ATOL, RTOL = 1e-5, 1e-4  # for fp32 sums in another order
Outcome = dict[str, Any]


class NotPromised(Exception):
    """The target states a convention under which the law does not apply; says which."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A mixture-of-experts layer and the conventions that its library states.

    ``run(layer, tokens)`` takes tokens (B, T, d) and returns a dict: "output" (B, T, d) and
    "weights" (B, T, E), 0 where an expert's output is not used; if the library has them also
    "logits" and "probs" (B, T, E), "chosen" (B, T, E) bool (default: weights ≠ 0), "loss" (the
    balance loss, a scalar), "counts" (E,) (what the library logs as load), "statistics" (name →
    number: "max_violation", "entropy" or "balancedness"). With ``padded`` it takes a third
    argument, (B, T) bool, true for padding.
    """

    name: str
    build: Callable[[], nn.Module]  # with weights drawn from torch's global random state
    run: Callable[..., Outcome]
    width: int  # d, which must differ from E
    experts: int  # E
    version: str = ""  # of the library
    router: str = "router"  # prefix of the names of the router's parameters
    networks: str = "experts"  # prefix of the names of the experts' parameters
    batch: int = 4  # sequences; half of them depend on no other
    tokens: int = 16  # per sequence
    k: int | None = None  # experts per token, if the number is equal for all tokens
    score: Literal["softmax", "sigmoid"] | None = None  # function from logits to weights
    weights_sum: float | None = None  # per token without drops; None: scores times ``scale``
    scale: float = 1.0
    loss_mean: Literal["sequence", "batch"] | None = (
        None  # the loss is a mean per sequence or batch
    )
    even_loss: float | None = None  # the loss if all probabilities are equal
    loss_in_training: bool = True  # False: the laws use the loss in evaluation mode
    selection_bias: str | None = None  # name of the buffer or parameter that only selects
    causal: bool = False  # promised: no token sees later ones
    padded: bool = False  # ``run`` takes a mask of padding
    reduces_ranks: bool = False  # the loss is computed from all ranks' tokens
    same_bits: bool = False  # promised: under bf16 autocast the routing has the bits of fp32
    # (layer, tokens, outcome) → outputs (B, T, N, d) of the experts, and (B, T, d) of the rest
    parts: Callable[[nn.Module, Tensor, Outcome], tuple[Tensor, Any]] | None = None
    after_step: Callable[[nn.Module, Outcome], Any] | None = None  # what follows an optimizer step
    not_promised: Mapping[str, str] = field(default_factory=dict)  # law, or one of HALVES → reason
    runs: str = ""  # the library's part that runs; "": its whole layer
    # law → script in findings/ that shows its failure in several layers or versions of a library
    scripts: Mapping[str, str] = field(default_factory=dict)


def require_promise(is_promised: Any, reason: str) -> None:
    """Raise NotPromised with ``reason`` unless ``is_promised``."""
    if not is_promised:
        raise NotPromised(reason)


def build_layer(target: Target, seed: int = 0) -> nn.Module:
    """Return a layer with random weights that depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return target.build()


def draw_tokens(target: Target, seed: int = 1) -> Tensor:
    """Return tokens (B, T, d) of N(0, 1)."""
    return seeded_randn(target.batch, target.tokens, target.width, seed=seed)


def run_layer(
    target: Target, layer: nn.Module, tokens: Tensor, *padding: Tensor, training: bool = False
) -> Outcome:
    """Run a layer with a fixed random state; UserError if the adapter's tensors do not fit."""
    layer.train(training)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        outcome = call_adapter(target, layer, tokens.clone(), *padding)  # some change it in place
    values = {name: value for name, value in outcome.items() if value is not None}
    for name, size in (("output", target.width), ("weights", target.experts)):
        shape = (*tokens.shape[:2], size)
        if name not in values or values[name].shape != shape:
            kind = tuple(values[name].shape) if name in values else f"only {', '.join(values)}"
            raise UserError.at(f"run: {name}", found=kind, allowed=f"a tensor {shape}")
    return {"chosen": values["weights"] != 0, **values}


def call_adapter(target: Target, layer: nn.Module, *tensors: Tensor) -> Outcome:
    """Run a layer as it is; ValueError for an assertion of the library, which breaks no law."""
    try:
        return target.run(layer, *tensors)
    except AssertionError as error:
        raise ValueError(f"run: {error}") from error


def run_loss(target: Target, layer: nn.Module, tokens: Tensor) -> list[Tensor]:
    """Return the balance loss and its gradients for the router; NotPromised without one."""
    loss: Any = run_layer(target, layer, tokens, training=target.loss_in_training).get("loss")
    require_promise(loss is not None, "no balance loss")
    parameters = router_parameters(target, layer)
    assert loss.requires_grad, "a gradient of the balance loss reaches the router: found none"
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return [loss, *gradients]


def router_parameters(target: Target, layer: nn.Module) -> list[nn.Parameter]:
    """Return the router's parameters that learn from gradients; NotPromised without any."""
    named = dict(layer.named_parameters())
    names = [name for name in named if is_below(name, target.router) and named[name].requires_grad]
    require_promise(names, "the router has no parameters")
    return [named[name] for name in names if name != target.selection_bias]


def is_below(name: str, prefix: str) -> bool:
    """Return whether ``name`` is ``prefix``, or below it in the module tree."""
    return name == prefix or name.startswith(f"{prefix}.")


def expert_slices(target: Target, layer: nn.Module) -> list[list[Tensor]]:
    """Return for each of the N experts views of its parameters."""
    experts: dict[int, list[Tensor]] = {}
    for name, parameter in layer.named_parameters():
        number = re.match(r"\D*(\d+)\.", name.removeprefix(f"{target.networks}."))
        if is_below(name, target.networks):  # a module per expert, else parameters (N, …)
            values = parameter.data
            if not number and len(values) > target.experts:
                if values.ndim < 2:  # shared by all experts
                    continue
                values = values.unflatten(0, (target.experts, -1))  # of (N · rows, …)
            for expert in [int(number[1])] if number else range(len(values)):
                experts.setdefault(expert, []).append(values if number else values[expert])
    if not experts:
        raise UserError.at("networks", found=target.networks, allowed="the experts' parameters")
    number = max(map(len, experts.values()))  # of tensors: an expert with fewer has no network
    return [experts[expert] for expert in sorted(experts) if len(experts[expert]) == number]


def assert_close(first: Tensor, second: Tensor, promise: str) -> None:
    """Raise AssertionError with ``promise`` unless two tensors are equal up to rounding."""
    first, second = first.double(), second.double()
    if not is_close(first, second):
        shapes = f"shapes {tuple(first.shape)} and {tuple(second.shape)}"
        is_same = first.shape == second.shape
        by = f"differs by up to {(first - second).abs().max():.3g}" if is_same else shapes
        raise AssertionError(f"{promise} {by}")


def assert_equal(outcome: Outcome, expected: Outcome, promise: str, *names: str) -> None:
    """Raise AssertionError with ``promise`` unless tensors, and the loss if any, are close."""
    for name in (*names, *(["loss"] if "loss" in expected else [])):
        assert_close(outcome[name], expected[name], f"{promise}: {name}")


def has_same_state(module: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Return whether a module's state_dict equals ``state``, bit by bit."""
    values = {name: value for name, value in module.state_dict().items() if value is not None}
    return all(torch.equal(value, state[name]) for name, value in values.items())


def is_close(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of fp32 sums."""
    return first.shape == second.shape and torch.allclose(first, second, atol=ATOL, rtol=RTOL)


def draw_weights(module: nn.Module, std: float = 0.5) -> None:
    """Replace all parameters by large random ones, so that routing has no ties and no zeros.

    The seed is 0; the caller's random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=std)


def seeded_randn(*shape: int, seed: int = 1) -> Tensor:
    """Return N(0, 1) draws of this shape that depend only on ``seed``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
