"""Whether trainings and measurements can be: their labels, length, batches and views.

Every source says which task its labels are of; the task says why it cannot do without classes.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import compress, islice
from typing import Any

from moecore.attacks.gradient import DLR_CLASSES, objective_refusal
from moecore.core.config import part_classes_by_kind
from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.data.views.views import UNEVEN_REFUSAL, ViewSettings
from moecore.measure.calibrators.base import Calibrator
from moecore.study.stages import TRAINING_PHASES
from moecore.study.study import Misfits, Study

# of Training, with the value that switches each off
NEED_CLASSES = {"label_smoothing": 0, "shots": "null", "mix": "null"}
MEASURED_KINDS = {  # the kind of task that a measurement is of, why not others, and its sources
    "word_swaps": (
        "next_token",
        "is no text, and word_swaps swaps words",
        "docstrings or wikitext",
    ),
    "cohort_checks": ("regression", "has classes, and cohort_checks needs ages", "phantom or bids"),
    "retrieval": (
        "image_text",
        "has no captions, and retrieval looks for them",
        "captioned_mosaic",
    ),
}
FLAT_WITH_CLASSES = ("invariance", "corruptions", "stability", "few_shot", "lipschitz")
FALSIFIED = "which would falsify the truth of data.{}; allowed: leave it out"
Views = Iterator[tuple[tuple, str, ViewSettings]]


def label_misfits(study: Study) -> Misfits:
    """Yield settings that the labels of a phase do not allow."""
    tasks: dict[str, Any] = {phase: source.labels_task for phase, source in study.data.items()}
    kinds = {phase: task.model_fields["kind"].default for phase, task in tasks.items()}
    numbers: set[str] = {phase for phase, task in tasks.items() if task.needs_classes("classes")}
    yield from _mixed_label_problems(study, numbers)
    yield from _training(study, tasks)
    yield from _distillation(study, tasks)
    yield from _attacks(study, tasks)
    yield from _survivors(study, tasks)
    yield from _calibrator(study, kinds)
    yield from _measurements(study, kinds, numbers)
    yield from _views_of_text(study, kinds)
    if kinds.get("pretrain") == "next_token":
        yield from _models_of_text(study)
    yield from _captions(study, kinds)


def list_training_settings(study: Study) -> Iterator[tuple[tuple, str, Any]]:
    """Yield where training settings stand, on which data of ``load_previews``, and the settings."""
    for phase in TRAINING_PHASES:
        if (training := getattr(study, phase)) is not None:
            yield (phase,), phase, training
    if (teacher := study.teacher) is not None and teacher.training is not None:
        learned = "pretrain" if teacher.data is None else "teacher"
        yield ("teacher", "training"), learned, teacher.training


def format_non_default_settings(value: Any) -> str:
    """Return settings as what was set of them."""
    if hasattr(value, "model_dump"):
        return str(value.model_dump(exclude_defaults=True) or "it")
    return str(value)


def _mixed_label_problems(study: Study, numbers: set[str]) -> Misfits:
    """A model that answers with a number cannot be fine-tuned on classes with the same head."""
    phases = study.run.phases
    other = [phase for phase in phases if (phase in numbers) != (phases[0] in numbers)]
    if numbers and other:
        both = f"data.{phases[0]} and data.{other[0]} are of two sorts, real numbers and classes"
        yield ("run", "phases", phases.index(other[0])), f"{both}; allowed: phases of one sort"


def _training(study: Study, tasks: dict[str, Any]) -> Misfits:
    for keys, phase, training in list_training_settings(study):
        for key, allowed in NEED_CLASSES.items() if phase in tasks else ():
            value = getattr(training, key, None)
            if value and (reason := tasks[phase].needs_classes(key)):
                text = f"found {format_non_default_settings(value)}, but {reason} (data.{phase})"
                yield (*keys, key), f"{text}; allowed: {allowed}"


def _distillation(study: Study, tasks: dict[str, Any]) -> Misfits:
    reason = "pretrain" in tasks and tasks["pretrain"].needs_classes("distillation")
    for name, method in study.methods.items():
        if reason and method.distillation and name in study.run.methods:
            text = f"a teacher's decision cannot be learned: {reason} (data.pretrain); allowed: 0"
            yield ("methods", name, "distillation"), text


def few_class_misfits(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield attacks whose objective has no meaning for two classes."""
    for keys, attack in _list_attacks(study):
        for phase in study.run.phases:
            number = len(getattr(previews.get(phase), "classes", None) or ())
            if getattr(attack, "objective", None) == "dlr" and 0 < number < DLR_CLASSES:
                text = f"found dlr, but data.{phase} has {number} classes, fewer than {DLR_CLASSES}"
                yield (*keys, "objective"), f"{text}; allowed: task, cross_entropy"
                break


def _list_attacks(study: Study) -> list[tuple[tuple, Any]]:
    """Return where each attack on trained models stands, and its settings."""
    attacks: list[tuple[tuple, Any]] = []
    if study.robustness is not None:
        chosen = enumerate(study.robustness.attacks)
        attacks += [(("robustness", "attacks", index), attack) for index, attack in chosen]
    if study.transfer is not None:
        attacks.append((("transfer", "attack"), study.transfer.attack))
    explorer: Any = getattr(study, "explorer", None)
    if explorer and "explorer" in study.run.measurements:
        attacks.append((("explorer", "attack"), explorer.attack))
    return attacks


def _attacks(study: Study, tasks: dict[str, Any]) -> Misfits:
    """Yield attacks that need classes, or one each, where the labels are none."""
    asked = [tasks[phase] for phase in study.run.phases if phase in tasks]
    for keys, attack in _list_attacks(study):
        objective = getattr(attack, "objective", None)
        if objective is None and any(task.needs_classes("classes") for task in asked):
            text = f"{attack.kind} needs classes, and the labels are real numbers"
            yield (*keys, "kind"), f"{text}; allowed: fgsm, pgd, apgd"
        elif objective and any(objective_refusal(objective, task) for task in asked):
            needed = "classes"
            if not any(task.needs_classes("classes") for task in asked):
                needed = "one label per image"
            allowed = "task (the loss that is learned), balance, routing_change"
            text = f"found {objective}, which needs {needed}; allowed: {allowed}"
            yield (*keys, "objective"), text


def _survivors(study: Study, tasks: dict[str, Any]) -> Misfits:
    reasons = filter(None, (task.needs_classes("share") for task in tasks.values()))
    if study.robustness is not None and study.robustness.survivors:
        for reason in islice(reasons, 1):
            yield ("robustness", "survivors"), f"found true, but {reason}; allowed: false"


def _calibrator(study: Study, kinds: dict[str, str]) -> Misfits:
    if study.calibrate is None:
        return
    calibrator = study.calibrate.calibrator
    every = part_classes_by_kind(Calibrator)
    for index, phase in enumerate(study.run.phases):
        kind = kinds.get(phase)
        fitting = [name for name, part in every.items() if kind in part.tasks]
        if fitting and kind not in calibrator.tasks:
            text = f"found {calibrator.kind}, but the labels of data.{phase} are of another sort"
            yield ("calibrate", "calibrator", "kind"), f"{text}; allowed: {', '.join(fitting)}"
        if kind is not None and not fitting:
            reason = f"data.{phase} has labels that calibrate does not take ({kind})"
            yield ("run", "phases", index), f"{reason}; leave out the phase or the stage"


def _measurements(study: Study, kinds: dict[str, str], numbers: set[str]) -> Misfits:
    """Yield what measures flat images with classes, or measures ages, words or captions."""
    asked = study.run.measurements
    flat = [what for what in FLAT_WITH_CLASSES if what in asked]
    for index, phase in enumerate(study.run.phases):
        source = study.data.get(phase)
        if source is None or not any(study.run.covers(what, phase) for what in asked):
            continue
        where = ("run", "phases", index) if study.run.thorough is None else ("run", "thorough")
        if flat and (phase in numbers or source.volumes):
            text = f"measure flat images with classes, which data.{phase} has not"
            yield where, f"{', '.join(flat)} {text}; allowed: phases without {phase}"
        for what, (kind, reason, sources) in MEASURED_KINDS.items():
            if what in asked and kinds[phase] != kind:
                yield where, f"data.{phase} {reason}; allowed: kind: {sources}"


def _views_of_text(study: Study, kinds: dict[str, str]) -> Misfits:
    """Text has no views, and no pixels that an attack could change."""
    for keys, phase, training in list_training_settings(study):
        for key, usual in (("views", ViewSettings()), ("adversarial", None)):
            value = getattr(training, key)
            if kinds.get(phase) == "next_token" and value != usual:
                changed = format_non_default_settings(value)
                yield (*keys, key), f"found {changed}, but data.{phase} is text; leave it out"


def _models_of_text(study: Study) -> Misfits:
    """Stages and methods that text does not have."""
    for section in ("robustness", "transfer", "finetune"):
        if getattr(study, section) is not None:
            yield (section,), "data.pretrain is text, which this stage does not take; leave it out"
    if study.routing is not None:
        for key in ("views", "augmentations", "augmentation_images"):
            if key in study.routing.model_fields_set:
                text = "data.pretrain is text, which has no views; leave it out"
                yield ("routing", key), text
    for name, method in study.methods.items():
        if name not in study.run.methods:
            continue
        if method.views == 2 or method.guided or method.upcycle:
            text = "the method needs two views or a teacher, and data.pretrain is text"
            yield ("methods", name), f"{text}; take another method"
        if method.permuted:
            text = "found true, but the label of a word is the next one (data.pretrain is text)"
            yield ("methods", name, "permuted"), f"{text}; allowed: false"


def _captions(study: Study, kinds: dict[str, str]) -> Misfits:
    """Captions need two towers; where left and right matter no view may flip."""
    sided: set[str] = {phase for phase, source in study.data.items() if source.sided}
    for keys, phase, training in list_training_settings(study):
        if phase in sided and training.views.flip:
            text = f"found true, but in data.{phase} left and right matter"
            yield (*keys, "views", "flip"), f"{text}; allowed: false"
    if kinds.get("pretrain") == "image_text":
        teacher = getattr(study.teacher, "model", None)
        for where, model in ((("model",), study.model), (("teacher", "model"), teacher)):
            if model is not None and model.kind != "two_towers":
                text = f"found {model.kind}, but data.pretrain has captions; allowed: two_towers"
                yield (*where, "kind"), text


def unused_teacher_note(study: Study) -> str | None:
    """Return a line where each of several seeds trains a teacher from which no method learns."""
    asked = [study.methods[name] for name in study.run.methods]
    needed = any(method.guided or method.upcycle for method in asked)
    number = len(study.run.seeds)
    if needed or number == 1 or study.teacher is None or study.teacher.training is None:
        return None
    return (
        f"teacher: {number} are trained, one per seed, but no method of run.methods needs one; "
        "teacher: {kind: no_teacher} trains none"
    )


def gradientless_router_note(study: Study) -> str | None:
    """Return a line where routers get almost no gradient of the task.

    A norm behind Swin V2's experts takes away the length that a single expert's weight gave.
    """
    if study.model is None:
        return None
    methods = {name: study.methods[name] for name in study.run.methods}
    names = [
        name
        for name, method in methods.items()
        if getattr(method.router, "k", None) == 1
        and method.merge_model_settings(study.model).kind == "swin_v2"
    ]
    if not names:
        return None
    why = "one expert per token in a swin_v2, whose norm leaves routers almost no gradient"
    return f"methods {', '.join(names)}: {why} of the task; model.kind: swin_moe gives them one"


def schedule_misfits(study: Study) -> Misfits:
    """Yield warm-ups that are longer than the training; no data are needed to see it."""
    for keys, _, training in list_training_settings(study):
        yield from _schedule(keys, training)
    yield from _problems_of_methods(study, _schedule)


def _schedule(keys: tuple, training: Any) -> Misfits:
    if training.warmup_epochs > training.epochs:
        text = f"found {training.warmup_epochs:g}, but epochs is {training.epochs}"
        yield (*keys, "warmup_epochs"), f"{text}; allowed: 0 to {training.epochs}"


def _problems_of_methods(study: Study, rule: Callable[[tuple, Any], Misfits]) -> Misfits:
    """Yield what a rule says of ``pretrain`` as methods change it, where it is not said of all."""
    if study.pretrain is None:
        return
    of_all = set(rule((), study.pretrain))
    for name, method in study.methods.items():
        try:
            changed = method.merge_pretrain_settings(study.pretrain)
        except UserError:
            continue  # ``method_misfits`` says it
        for keys, text in rule((), changed):
            if (keys, text) not in of_all:
                yield ("methods", name, "pretrain", *keys), text


def training_image_misfits(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield batches and shots that the training images of a phase do not give."""
    for keys, phase, training in list_training_settings(study):
        if preview := previews.get(phase):
            yield from _sizes(keys, phase, training, preview)
    preview = previews.get("pretrain")
    if preview is None:
        return
    yield from _problems_of_methods(study, lambda keys, own: _sizes(keys, "pretrain", own, preview))
    asked = [study.methods[name] for name in study.run.methods if name in study.methods]
    fitted = any(method.guided_routing and not method.joint for method in asked)
    if preview.counts and fitted and study.teacher_router is not None:
        images = preview.images["train"]
        yield from _batch(("teacher_router", "batch"), study.teacher_router, images, "pretrain")


def _sizes(keys: tuple, phase: str, training: Any, preview: Card) -> Misfits:
    if preview.counts:
        yield from _batches_and_views(keys, phase, training, preview)
    views, place = training.views, (*keys, "views")
    if preview.truth:
        changes = [(*place, "randaugment"), (*place, "jitter"), (*place, "erasing"), (*keys, "mix")]
        settings = (views.randaugment, views.jitter, views.erasing, training.mix)
        for changed in compress(changes, settings):
            yield changed, f"found a change of pixels, {FALSIFIED.format(phase)}"
    if preview.short_side is None:
        sides = preview.size if isinstance(preview.size, tuple) else (preview.size,)
        if views.shift >= min(sides):
            text = f"found {views.shift}, but data.{phase} has images of {preview.size} pixels"
            yield (*place, "shift"), f"{text}; allowed: less than that"
        return
    if views.crop is None:
        yield (*place, "crop"), f"found null, but in data.{phase} {UNEVEN_REFUSAL}"


def _batches_and_views(keys: tuple, phase: str, training: Any, preview: Card) -> Misfits:
    counts = preview.counts["train"]
    images, why = sum(counts), f"data.{phase}"
    shots = getattr(training, "shots", None)
    if shots is not None and preview.classes:
        numbers, named = [number for number in counts if number], "a class"
        least = min(numbers)
        if len(counts) > 1:
            named = f"class {preview.classes[counts.index(least)]}"
        else:  # of drawn data the number of each class is not known yet
            numbers = [images // len(preview.classes)] * len(preview.classes)
            least = numbers[0]
        if shots > least:
            text = f"found {shots}, but {named} of data.{phase} has {least} training images"
            yield (*keys, "shots"), f"{text}; allowed: 1 to {least}, or null"
            return
        images = shots * len(numbers)
        why = f"{shots} shots of {len(numbers)} classes"
    yield from _batch((*keys, "batch"), training, images, why)


def _batch(keys: tuple, settings: Any, images: int, why: str) -> Misfits:
    if settings.batch > images:
        text = f"found {settings.batch}, but there are {images} training images ({why})"
        yield keys, f"{text}; allowed: 1 to {images}"


def idle_view_misfits(study: Study) -> Misfits:
    """Yield changes of images that are none, whatever the data are."""
    for keys, _, views in _list_views(study):
        for key in ("affine", "randaugment", "jitter"):
            change = getattr(views, key)
            if change is not None and change.is_identity:
                settings = ", ".join(name for name in type(change).model_fields if name != "names")
                text = f"found one that changes nothing; allowed: null, or other {settings}"
                yield (*keys, key), text
        if views.fill != "zeros" and not views.leaves_image:
            text = f"found {views.fill}, but no view reaches beyond its image"
            yield (*keys, "fill"), f"{text}; allowed: zeros, or a shift, a crop or an affine"
    for keys, _, training in list_training_settings(study):
        if training.mix is not None and not training.mix.active:
            text = "found one that mixes nothing; allowed: null, or mixup or cutmix above 0"
            yield (*keys, "mix"), text


def image_view_misfits(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield changes that images of one channel do not have, or that would falsify their truth."""
    for keys, phase, views in _list_views(study):
        preview = previews.get(phase)
        if preview is None:
            continue
        if preview.channels == 1:
            yield from _colours_of_grey(keys, phase, views)
        if preview.truth and keys == ("routing", "views"):  # those of trainings: training_rules.py
            for key in ("randaugment", "jitter", "erasing"):
                if getattr(views, key):
                    yield (*keys, key), f"found a change of pixels, {FALSIFIED.format(phase)}"
    routing, truths = study.routing, [name for name in study.run.phases if name in previews]
    for phase in [name for name in truths if previews[name].truth][:1]:
        if routing and "augmentations" in routing.model_fields_set and routing.augmentations:
            text = f"found changes of images, {FALSIFIED.format(phase)}"
            yield ("routing", "augmentations"), text


def _colours_of_grey(keys: tuple, phase: str, views: ViewSettings) -> Misfits:
    problem = f"but data.{phase} has grey images, whose saturation nothing changes"
    if views.jitter is not None and views.jitter.saturation:
        text = f"found {views.jitter.saturation:g}, {problem}; allowed: 0"
        yield (*keys, "jitter", "saturation"), text
    if views.randaugment is not None and set(views.randaugment.names) == {"saturation"}:
        yield (*keys, "randaugment", "names"), f"found saturation, {problem}; allowed: others"


def _list_views(study: Study) -> Views:
    """Yield where views stand, the data that they are of, and the views."""
    for keys, phase, training in list_training_settings(study):
        yield (*keys, "views"), phase, training.views
    for section in ("routing", "explorer"):
        settings: Any = getattr(study, section, None)
        if settings is None or not study.run.phases:
            continue
        phase = study.run.phases[0]
        if section == "routing":
            yield (section, "views"), phase, settings.views
        for index, asked in enumerate(settings.augmentations):
            if not isinstance(asked, str):
                yield (section, "augmentations", index, "views"), phase, asked.views
