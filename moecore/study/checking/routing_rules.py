"""A method's router against its experts, balance and losses: what would train and teach nothing."""

from collections.abc import Sequence
from math import prod

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import BackboneModel
from moecore.nn.balances.quantile import Quantile
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import MoESettings, scale_router_k
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.relu import Relu
from moecore.nn.routers.top_k_softmax import TopKSoftmax
from moecore.study.study import TRAINING_PHASES, Misfits, Study
from moecore.training.method import Method
from moecore.training.regularizers.adaptive_l1 import AdaptiveL1
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.switch_balance import SwitchBalance

TEACHING_NO_CHOICE = frozenset({"orthonormal", "basis"})  # what losses on weights alone need


def routing_misfits(study: Study, name: str, method: Method) -> Misfits:
    """Yield what of a method's routing, that of a text tower too, has no effect or an end."""
    yield from _groups_of_images(study, name, method)
    towers = (((), method, method.losses), (("text",), method.text, method.text_losses))
    for keys, tower, losses in towers:
        if tower is None or tower.router is None or tower.experts is None:
            continue
        try:
            router = scale_router_k(tower.router, tower.experts)
        except UserError:
            continue  # building the model says it
        for rule in (_balance, _constant_weight, _aim_of_relu, _constant_loss, _unlearned_router):
            for place, text in rule(router, tower.experts, losses):
                yield ("methods", name, *keys, *place), text


def layer_misfits(name: str, moe: MoESettings, images: int, model: BackboneModel) -> Misfits:
    """Yield what a built model's layers leave without effect, or its steps' tokens do not reach.

    images: of a step, each view for itself.
    """
    blocks = moe.indices(model.depth)
    if "previous" in moe.router.wants and len(blocks) == 1:
        problem = "found true, but the model has one MoE layer, and so none before it"
        yield ("methods", name, "router", "residual"), f"{problem}; allowed: false, or more blocks"
    if isinstance(getattr(moe.router, "balance", None), Quantile):
        layouts = map(model.layout_of, blocks)
        tokens = images * min(layout.special + prod(layout.grid) for layout in layouts)
        k, experts = int(moe.scaled_router.active(moe.experts.choices)), moe.experts.choices
        if tokens * k < experts:
            problem = f"found quantile, and a step has {tokens} tokens of {k} choices, fewer than"
            text = f"{problem} {experts} experts; allowed: a larger batch"
            yield ("methods", name, "router", "balance"), text


def _balance(router: Router, experts: Experts, losses: Sequence[Regularizer]) -> Misfits:
    """Yield where a router's balance finds nothing to balance, or a loss beside it."""
    balance = getattr(router, "balance", None)
    if balance is None:
        return
    try:
        balance.check_k(int(router.active(experts.choices)), experts.choices)
    except UserError as error:
        yield ("router", "k"), str(error).removeprefix("router.k: ")
    for index, regularizer in enumerate(losses):
        if balance.is_alone and regularizer.balances_load:
            problem = f"{regularizer.kind} balances the load beside the router's {balance.kind}"
            text = f"{problem}; allowed: one of both, or the balance loss_free"
            yield ("regularizers", index), text


def _constant_weight(router: Router, experts: Experts, losses: Sequence[Regularizer]) -> Misfits:
    """Yield where the one chosen expert's weight is always 1, and nothing else teaches a choice."""
    keys: tuple[str, ...] = ("router",)
    inner = getattr(router, "router", None)
    if inner is not None:
        router, keys = inner, ("router", "router")
    if not isinstance(router, NoisyTopK) or isinstance(router, TopKSoftmax):
        return  # the latter is renormalised by its very definition
    if router.k > 1 or router.renormalise is not True:
        return
    if any(loss.weight and not loss.needs & TEACHING_NO_CHOICE for loss in losses):
        return
    problem = "found true with k = 1: the weight is always 1, and no loss teaches the router"
    allowed = "straight, false, a larger k, or a regularizer that teaches it"
    yield (*keys, "renormalise"), f"{problem}; allowed: {allowed}"


def _aim_of_relu(router: Router, experts: Experts, losses: Sequence[Regularizer]) -> Misfits:
    """Yield where the number of experts that relu is to use is no aim, or nothing brings it there.

    With all of them no weight of the loss is too small.
    """
    if not isinstance(router, Relu):
        return
    if router.k >= experts.choices:
        problem = f"found {router.k}, and of {experts.choices} experts relu then leaves out none"
        yield ("router", "k"), f"{problem}; allowed: 1 to {experts.choices - 1}"
    if not any(isinstance(loss, AdaptiveL1) and loss.weight for loss in losses):
        problem = f"found no adaptive_l1, which alone brings relu to k = {router.k} experts"
        yield ("regularizers",), f"{problem}; allowed: it, with a weight above 0"


def _constant_loss(router: Router, experts: Experts, losses: Sequence[Regularizer]) -> Misfits:
    """Yield the Switch loss where all experts are used alike, so that it is a constant."""
    for index, loss in enumerate(losses):
        if isinstance(loss, SwitchBalance) and not router.chooses_per_token:
            problem = f"found {loss.kind}, a constant beside the router {router.kind}, which uses"
            allowed = "a router whose tokens choose, or another loss"
            yield ("regularizers", index), f"{problem} all experts alike; allowed: {allowed}"


def _unlearned_router(router: Router, experts: Experts, losses: Sequence[Regularizer]) -> Misfits:
    """Yield losses on the choice of a router that learns nothing."""
    for index, loss in enumerate(losses):
        if not router.has_expert_rows and not loss.needs & TEACHING_NO_CHOICE:
            problem = f"found {loss.kind}, but the router {router.kind} learns nothing"
            yield ("regularizers", index), f"{problem}; allowed: no such loss, or another router"


def _groups_of_images(study: Study, name: str, method: Method) -> Misfits:
    """Yield groups of the Switch loss that do not divide the images of a phase's step."""
    for phase in TRAINING_PHASES:
        settings = getattr(study, phase)
        if settings is None:
            continue
        if phase == "pretrain":
            try:
                settings = method.merge_pretrain_settings(settings)
            except UserError:
                continue  # ``method_misfits`` says it
        images = settings.batch * method.views
        for index, loss in enumerate(method.regularizers):
            if not isinstance(loss, SwitchBalance) or loss.level != "group":
                continue
            if images % loss.group_size:
                place = ("methods", name, "regularizers", index, "group_size")
                problem = f"found {loss.group_size}, and a step of {phase} has {images} images"
                yield place, f"{problem}; allowed: a divisor of these"
