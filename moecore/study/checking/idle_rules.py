"""Settings of methods and models that others leave without an effect.

Whoever writes them believes in one. A setting counts where its value is not the default. tools/
find_idle_settings.py searches for more of them.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from moecore.nn.backbones.sfcn import Sfcn
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.balances.quantile import Quantile
from moecore.nn.experts.base import Experts
from moecore.nn.experts.mlp import Mlp
from moecore.nn.routers.depth import Depth
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.top_p import TopP
from moecore.study.study import Misfits, Study
from moecore.training.method import Method
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.group_sparsity import GroupSparsity
from moecore.training.regularizers.switch_balance import SwitchBalance

Idle = Iterator[tuple[tuple, str]]


def idle_setting_misfits(study: Study) -> Misfits:
    """Yield what of each method, of the model and of the teacher's has no effect."""
    for name, method in study.methods.items():
        yield from _method(("methods", name), method)
    models = (
        (("model",), study.model),
        (("teacher", "model"), getattr(study.teacher, "model", None)),
    )
    for keys, model in models:
        for key in ("", "image"):
            tower = getattr(model, key, None) if key else model
            if tower is not None:
                yield from _below((*keys, *filter(None, [key])), _backbone(tower))


def unused_stem_note(study: Study) -> str | None:
    """Return a line where a stem's setting does nothing beside another stem.

    It is no mistake: the preset ``adni`` lays a linear stem over one of convolutions.
    """
    model = study.model
    if not isinstance(model, Vit3d):
        return None
    for name, stem in (("pool", "pooled"), ("stem_width", "conv")):
        for _, text in _list_changed(model, [name], f"the stem is {model.stem}", f"stem: {stem}"):
            if model.stem != stem:
                return f"model.{name}: {text}"
    return None


def _method(keys: tuple, method: Method) -> Idle:
    if isinstance(method.upcycle, BaseModel) and method.experts is None:
        text = (
            f"found {method.upcycle.kind}, but a dense method has no experts; allowed: true, false"
        )
        yield (*keys, "upcycle", "kind"), text
    if method.upcycle and isinstance(method.experts, Mlp):
        why = "the experts begin as the teacher's MLPs"
        changed = _list_changed(method.experts, ["init"], why, "upcycle: false")
        yield from _below((*keys, "experts"), changed)
    for place, tower, losses in (
        ((), method, method.regularizers),
        (("text",), method.text, method.text_losses),
    ):
        if tower is not None and tower.router is not None and tower.experts is not None:
            where = (*keys, *place)
            yield from _below((*where, "router"), _router(tower.router, tower.experts))
            if (
                isinstance(tower.experts, Mlp)
                and tower.experts.fine == 1
                and not tower.experts.shared
            ):
                text = "found 1 piece of each expert, which is the whole; allowed: null, or above 1"
                yield (*where, "experts", "fine"), text
        for index, loss in enumerate(losses):
            yield from _below((*keys, *place, "regularizers", index), _loss(loss))


def _below(keys: tuple, misfits: Iterable[tuple[tuple, str]]) -> Idle:
    for place, text in misfits:
        yield (*keys, *place), text


def _list_changed(settings: Any, names: Iterable[str], why: str, allowed: str) -> Idle:
    """Yield the settings among ``names`` whose value is not the default."""
    for name in names:
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            yield (name,), f"found {value}, but {why}; allowed: leave it out, or {allowed}"


def _router(router: Any, experts: Experts) -> Idle:
    """Yield the keys below ``router`` that do nothing, of a router inside of it too."""
    inner = getattr(router, "router", None)
    if inner is not None:
        yield from _below(("router",), _router(inner, experts))
    if isinstance(router, NoisyTopK):
        if not router.has_capacity:
            why = "without a capacity no images share one"
            yield from _list_changed(router, ["group_size"], why, "a capacity_factor")
        yield from _groups(router)
    balance = getattr(router, "balance", None)
    if inner is None and balance is not None and not isinstance(balance, Quantile):
        if router.active(experts.choices) >= experts.choices:
            text = f"found {balance.kind}, but every token has all {experts.choices} experts"
            yield ("balance",), f"{text}; allowed: null, or a smaller k"
    if isinstance(router, TopP) and router.k == 1:
        yield ("k",), "found 1: each token then has its first expert; allowed: null, or above 1"
    if isinstance(router, Depth) and router.sampling is None:
        why = "without sampling there is no penalty"
        yield from _list_changed(router, ["sampling_weight"], why, "sampling: bce or predictor")
    if isinstance(router, Eigenbasis) and "basis" in experts.provides:
        why = f"the experts {experts.kind} lend their bases"
        yield from _list_changed(router, ["rank"], why, "other experts")


def _groups(router: NoisyTopK) -> Idle:
    """Yield groups that contain a token's best k experts in any case."""
    groups = router.groups
    if groups is None:
        return
    valued_by = groups.per_group or max(1, router.k // groups.kept)
    if groups.kept == groups.number:
        text = f"found {groups.kept}, and there are as many groups, so that none is left out"
        yield ("groups", "kept"), f"{text}; allowed: 1 to {groups.number - 1}"
    elif valued_by == 1 and groups.kept >= router.k:
        text = f"found {groups.kept}: the groups of the {router.k} best experts are always kept"
        yield ("groups", "kept"), f"{text}; allowed: fewer than router.k, or a per_group above 1"


def _loss(loss: Regularizer) -> Idle:
    if isinstance(loss, SwitchBalance) and loss.level != "group":
        why = f"the level is {loss.level}"
        yield from _list_changed(loss, ["group_size"], why, "level: group")
    if isinstance(loss, GroupSparsity) and loss.filter == "average":
        names = ("sigma_start", "sigma_end", "exponent")
        yield from _list_changed(loss, names, "the filter is average", "filter: gaussian")
    elif isinstance(loss, GroupSparsity) and loss.sigma_start == loss.sigma_end:
        yield from _list_changed(loss, ["exponent"], "σ stays as it is", "another sigma_end")


def _backbone(model: Any) -> Idle:
    if getattr(model, "drop_path", 0) and model.depth == 1:
        text = f"found {model.drop_path:g}, which grows from 0 at the first block, the only one"
        yield ("drop_path",), f"{text}; allowed: 0, or more blocks"
    if isinstance(model, Sfcn) and model.head != "bins":
        names = ("first_bin", "bin_width", "bins", "bin_deviation")
        yield from _list_changed(model, names, f"the head is a {model.head}", "head: bins")
