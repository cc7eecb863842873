"""What of params.yaml has no meaning for volumes, and what only volumes have."""

from collections.abc import Iterable
from typing import Any

from moecore.data.volumes.volume_preparation import REGIONS
from moecore.measure.routing_metrics.two_view_augmentations import OF_VOLUMES
from moecore.study.study import Misfits, Study
from moecore.study.training_rules import format_non_default_settings, list_training_settings

VOLUME_MODELS = ("vit3d", "sfcn")
VOLUME_VIEWS = "shift, flip, affine and fill"
# of ViewSettings, for flat images only
FLAT_VIEWS = ("crop", "randaugment", "jitter", "erasing")


def volume_misfits(study: Study) -> Misfits:
    """Yield what does not fit; sources say ``volumes`` where images are volumes."""
    volumes: set[str] = {phase for phase, source in study.data.items() if source.volumes}
    if volumes:
        yield from _views(study, volumes)
        yield from _regions(study)
    yield from _models(study, "pretrain" in volumes)


def _views(study: Study, volumes: set[str]) -> Misfits:
    for keys, phase, training in list_training_settings(study):
        if phase in volumes:
            yield from _flat_views((*keys, "views"), training.views)
    if study.routing is not None and volumes & set(study.run.phases):
        yield from _flat_views(("routing", "views"), study.routing.views)
        yield from _augmentations("routing", study.routing.augmentations)
    explorer: Any = getattr(study, "explorer", None)
    looked_at = set(study.run.thorough or study.run.phases)
    if explorer and "explorer" in study.run.measurements and volumes & looked_at:
        yield from _augmentations("explorer", explorer.augmentations)


def _augmentations(section: str, augmentations: Iterable[Any]) -> Misfits:
    for index, asked in enumerate(augmentations):
        keys = (section, "augmentations", index)
        if not isinstance(asked, str):
            yield from _flat_views((*keys, "views"), asked.views)
        elif asked not in OF_VOLUMES:
            allowed = ", ".join(OF_VOLUMES)
            yield keys, f"found {asked}, which is for flat images; allowed for volumes: {allowed}"


def _flat_views(keys: tuple, views: Any) -> Misfits:
    for name in FLAT_VIEWS:
        if value := getattr(views, name, None):
            text = f"found {format_non_default_settings(value)}, which is for flat images"
            yield (*keys, name), f"{text}; volumes have {VOLUME_VIEWS}"
    if views.affine is not None and views.affine.shear:
        text = f"found {views.affine.shear:g}, which is for flat images; allowed for volumes: 0"
        yield (*keys, "affine", "shear"), text


def _regions(study: Study) -> Misfits:
    """Region experts need tissue maps, which a cohort of one's own may lack, and no others."""
    source: Any = study.data.get("pretrain")
    lacks_maps = hasattr(source, "maps") and source.maps is None and source.dseg is None
    for name, method in study.methods.items():
        if name not in study.run.methods or method.regions is None:
            continue
        if lacks_maps:
            text = "needs tissue maps, but maps and dseg of data.pretrain are null"
            yield ("methods", name, "regions"), f"{text}; allowed: null, or such maps"
        for index, tissue in enumerate(method.regions.experts):
            if tissue not in REGIONS and source is not None and "." not in source.kind:
                place = ("methods", name, "regions", "experts", index)
                yield place, f"found {tissue!r}; allowed: {', '.join(REGIONS)}"


def _models(study: Study, volumes: bool) -> Misfits:
    teacher = study.teacher
    if volumes and teacher is not None and teacher.kind == "timm":
        text = "found timm, whose models are of flat images"
        yield ("teacher", "kind"), f"{text}; allowed for volumes: dense, no_teacher"
    models: dict[tuple[str, ...], Any] = {("model", "kind"): study.model}
    models["teacher", "model", "kind"] = getattr(teacher, "model", None)
    for keys, model in models.items():
        if model is not None and (model.kind in VOLUME_MODELS) != volumes:
            what, allowed = ("flat images", "vit")
            if volumes:
                what, allowed = ("volumes", ", ".join(VOLUME_MODELS))
            text = f"found {model.kind}, but the images of data.pretrain are {what}"
            yield keys, f"{text}; allowed: {allowed}"
