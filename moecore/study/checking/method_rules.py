"""The methods against each other's parts, the model and the teacher."""

from moecore.core.config import list_own_names
from moecore.core.files import UserError
from moecore.data.views.views import ViewSettings
from moecore.study.method_rules import routing_misfits
from moecore.study.study import Misfits, Study
from moecore.training.method import Method
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
                yield place, f"{regularizer.kind} needs {NEEDED_WORDS[need]}, but {_router(method)}"
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


def _router(method: Method) -> str:
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
