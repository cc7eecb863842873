"""Settings of views that change no image: whoever wrote them believes that they do."""

from collections.abc import Iterator, Mapping
from typing import Any

from moecore.data.sources.base import PlannedData
from moecore.data.views.views import ViewSettings
from moecore.study.study import Misfits, Study
from moecore.study.training_rules import list_training_settings

FALSIFIED = "which would falsify the truth of data.{}; allowed: leave it out"
Views = Iterator[tuple[tuple, str, ViewSettings]]


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


def image_view_misfits(study: Study, previews: Mapping[str, PlannedData]) -> Misfits:
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
