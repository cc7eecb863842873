"""The methods against the model, the teacher and each other's parts.

A router against its experts, balance and losses: what would train and teach nothing. Settings that
others leave without an effect: one counts where its value is not the default;
tools/find_idle_settings.py searches for more of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from pydantic import BaseModel

from moecore.core.config import list_own_names
from moecore.core.files import UserError
from moecore.data.views.views import ViewSettings
from moecore.nn.backbones.base_model import BackboneModel
from moecore.nn.backbones.sfcn import Sfcn
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.balances.quantile import Quantile
from moecore.nn.experts.base import Experts
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings, scale_router_k
from moecore.nn.routers.base import Router
from moecore.nn.routers.depth import Depth
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.relu import Relu
from moecore.nn.routers.top_k_softmax import TopKSoftmax
from moecore.nn.routers.top_p import TopP
from moecore.study.stages import TRAINING_PHASES
from moecore.study.study import Misfits, Study
from moecore.training.method import Method
from moecore.training.regularizers.adaptive_l1 import AdaptiveL1
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.group_sparsity import GroupSparsity
from moecore.training.regularizers.switch_balance import SwitchBalance
from moecore.training.teachers.base import Teacher
from moecore.training.upcycling_kinds import Granular

NO_TEACHER = "no_teacher"
NEEDED_WORDS = {
    "routing": "a router",
    "load": "a router that provides load probabilities",
    "guidance": "a teacher",
    "orthonormal": "a router with start: orthonormal",
    "sparsity": "the router relu",
    "embeddings": "the router dynamic",
    "zero_computation": "experts with zero_computation",
    "basis": "experts or a router that have bases (eigen, eigenbasis)",
}


ADDED_LOSSES = {  # that a method adds by itself, and by what
    "teacher_router": "teacher_router: {fit: joint}",
    "region_routing": "regions",
}
TEACHING_NO_CHOICE = frozenset({"orthonormal", "basis"})  # what losses on weights alone need
Idle = Iterator[tuple[tuple, str]]


def method_misfits(study: Study) -> Misfits:
    """Yield where a method does not find what its parts need."""
    for name, method in study.methods.items():
        yield from _regularizers(study, name, method)
        yield from _repeated_losses(name, method)
        yield from routing_misfits(study, name, method)
        yield from _size(study, name, method)
        if isinstance(method.upcycle, Granular):
            for keys, text in method.upcycle.misfits(method.router, method.experts):
                yield ("methods", name, *keys), text
        if method.guided_finetuning and not method.guided:
            text = "nothing of the method needs a teacher; allowed: false, null, or with router_kl"
            place = ("methods", name, "guided_finetuning")
            yield place, f"{text}, distillation or the router teacher_routed"
        if method.unguided_regularizers and not method.guided_routing:
            text = "no loss of the method needs a teacher, so none is left out; allowed: []"
            yield ("methods", name, "unguided_regularizers"), text
        if "teacher_router" in method.model_fields_set and not method.guided_routing:
            text = (
                "nothing of the method is guided by a teacher's router; allowed: leave it out, or"
            )
            place = ("methods", name, "teacher_router")
            yield place, f"{text} the regularizer router_kl or the router teacher_routed"
        if name in study.run.methods:
            yield from _teacher_keys(study, name, method)
            yield from _same_views(study, name, method)


def _regularizers(study: Study, name: str, method: Method) -> Misfits:
    for index, regularizer in enumerate(method.regularizers):
        place = ("methods", name, "regularizers", index)
        for need in sorted(regularizer.needs & set(NEEDED_WORDS)):
            if need == "guidance":
                if _has_no_teacher(study) and name in study.run.methods:
                    yield (
                        place,
                        f"{regularizer.kind} needs a teacher, but {_no_teacher_words(study)}",
                    )
            elif need not in method.provided:
                yield (
                    place,
                    f"{regularizer.kind} needs {NEEDED_WORDS[need]}, but {_name_router(method)}",
                )
    for index, regularizer in enumerate(method.unguided_regularizers):
        place = ("methods", name, "unguided_regularizers", index)
        lacking = regularizer.needs & set(NEEDED_WORDS) - method.provided
        for need in sorted(lacking):
            yield place, f"{regularizer.kind} needs {NEEDED_WORDS[need]}; allowed: others"


def _repeated_losses(name: str, method: Method) -> Misfits:
    """Yield losses that there are already: a step has one term of each kind."""
    kept = [loss.kind for loss in method.regularizers if "guidance" not in loss.needs]
    for keys, losses, before in (
        (("regularizers",), method.regularizers, []),
        (("unguided_regularizers",), method.unguided_regularizers, kept),
        (("text", "regularizers"), method.text_losses, []),
    ):
        kinds = list(before)
        for index, loss in enumerate(losses):
            place = ("methods", name, *keys, index)
            if loss.kind in kinds:
                yield place, f"found {loss.kind} a second time; allowed: each kind once"
            elif added := ADDED_LOSSES.get(loss.kind):
                yield place, f"found {loss.kind}, which {added} adds; allowed: other losses"
            kinds.append(loss.kind)


def _size(study: Study, name: str, method: Method) -> Misfits:
    """Yield where ``model`` and ``pretrain`` do not take what a method changes of them."""
    changes = {"model": method.merge_model_settings, "pretrain": method.merge_pretrain_settings}
    for key, change in changes.items():
        try:
            if (section := getattr(study, key)) is not None:
                change(section)
        except UserError as error:
            yield ("methods", name, key), str(error)


def _teacher_keys(study: Study, name: str, method: Method) -> Misfits:
    """Yield what of a method asks for a teacher where the study has none."""
    if not _has_no_teacher(study):
        return
    asking = {
        "distillation": method.distillation > 0,
        "upcycle": method.upcycle,
        "router": method.routed_by_teacher,
    }
    for key, asks in asking.items():
        if asks:
            yield ("methods", name, key), f"needs a teacher, but {_no_teacher_words(study)}"


def _same_views(study: Study, name: str, method: Method) -> Misfits:
    """Two views of an image that are always the same teach a router nothing."""
    training = study.pretrain
    if method.views != 2 or training is None or training.views != ViewSettings():
        return
    kind = next(loss.kind for loss in method.regularizers if "two_views" in loss.needs)
    text = f"{kind} compares two views of an image, but pretrain.views changes nothing"
    yield ("methods", name, "regularizers"), f"{text}; give it a crop, shift or flip"


def _name_router(method: Method) -> str:
    if method.router is None:
        return "the method has no router"
    provided = ", ".join(sorted(method.provided)) or "nothing"
    return f"{method.router.kind} provides {provided}"


def _has_no_teacher(study: Study) -> bool:
    return study.teacher is None or study.teacher.kind == NO_TEACHER


def _no_teacher_words(study: Study) -> str:
    allowed = ", ".join(kind for kind in list_own_names(Teacher) if kind != NO_TEACHER)
    lack = (
        "there is no section teacher" if study.teacher is None else f"teacher.kind is {NO_TEACHER}"
    )
    return f"{lack}; allowed: {allowed}"


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
            yield from _below((*where, "router"), _idle_of_router(tower.router, tower.experts))
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


def _idle_of_router(router: Any, experts: Experts) -> Idle:
    """Yield the keys below ``router`` that do nothing, of a router inside of it too."""
    inner = getattr(router, "router", None)
    if inner is not None:
        yield from _below(("router",), _idle_of_router(inner, experts))
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
