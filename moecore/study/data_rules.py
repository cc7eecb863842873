"""The data of each phase before any of it is prepared, and whether the phases fit each other.

Also what has no meaning for volumes, or only for them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moecore.core.files import UserError, read_json
from moecore.data.card import Card, card_of_written_data
from moecore.data.prepared import SPLITS
from moecore.data.sources.base import Source
from moecore.data.volumes.volume_preparation import REGIONS
from moecore.measure.routing_metrics.two_view_augmentations import OF_VOLUMES
from moecore.study.study import Misfits, Study
from moecore.study.training_rules import format_non_default_settings, list_training_settings

PREPARED_DATA = Path("artifacts/data")
DVC_VARIABLE = "DVC_ROOT"  # the folder of the DVC project, which DVC tells its stages
VOLUME_MODELS = ("vit3d", "sfcn")
VOLUME_VIEWS = "shift, flip, affine and fill"
# of ViewSettings, for flat images only
FLAT_VIEWS = ("crop", "randaugment", "jitter", "erasing")


@contextmanager
def chdir_to_stages(home: Path) -> Iterator[None]:
    """Work where the stages of the project in ``home`` will: paths count from there."""
    before = os.environ.get(DVC_VARIABLE)
    with chdir(home):
        here = Path.cwd()
        projects = [folder for folder in (here, *here.parents) if (folder / ".dvc").is_dir()]
        if before is None and projects:
            os.environ[DVC_VARIABLE] = str(projects[0])
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(DVC_VARIABLE, None)


def load_previews(study: Study) -> dict[str, Card]:
    """Return what each data set will be, by phase, and that of a teacher which has its own.

    What is prepared already, with the same settings, counts before the raw data.
    """
    sources: dict[str, Source] = {**study.data}
    if study.teacher is not None and study.teacher.data is not None:
        sources["teacher"] = study.teacher.data
    return {
        phase: read_matching_data_card(PREPARED_DATA / phase / "card.json", source)
        or source.describe()
        for phase, source in sources.items()
    }


def data_source_key_path(phase: str) -> tuple[str, str]:
    """Return where the source of ``load_previews`` stands in params.yaml."""
    return ("teacher", "data") if phase == "teacher" else ("data", phase)


def data_problems(previews: Mapping[str, Card], written: Any) -> Misfits:
    """Yield what is missing or wrong with the data; written: the file as plain data."""
    for phase, preview in previews.items():
        if preview.problem is not None:
            section, key = data_source_key_path(phase)
            source = (written.get(section) or {}).get(key)
            named = isinstance(source, dict) and "root" in source
            yield (section, key, *(["root"] if named else [])), preview.problem


def misfits_with_pretrain_images(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield where what was pretrained cannot go on with the images of another phase."""
    first = previews.get("pretrain")
    if first is None:
        return
    for phase, preview in previews.items():
        if phase == "pretrain" or getattr(study, phase) is None:
            continue
        axes, others = len(preview.shape), len(first.shape)
        if axes != others:
            text = f"its images have {axes} axes, those of data.pretrain {others}"
            yield data_source_key_path(phase), f"{text}; allowed: as many"
        elif preview.channels != first.channels:
            text = f"found {preview.channels} channels, in data.pretrain {first.channels}"
            yield (
                data_source_key_path(phase),
                f"{text}; allowed: as many, choose other data for one of them",
            )
        elif phase == "teacher" and preview.shape != first.shape:
            sides, others = ("×".join(map(str, one.shape)) for one in (preview, first))
            text = f"its images are of {sides} pixels, those of data.pretrain of {others}"
            yield data_source_key_path(phase), f"{text}; allowed: the same size"
    yield from _unknown_answers(study, previews)


def _unknown_answers(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield methods that learn a teacher's decisions for other classes than their own."""
    teacher = previews.get("teacher")
    if teacher is None or teacher.classes == previews["pretrain"].classes:
        return
    for name in study.run.methods:
        if study.methods[name].distillation:
            text = "found a teacher of other classes (teacher.data) than data.pretrain has"
            yield ("methods", name, "distillation"), f"{text}; allowed: 0"


def describe_planned_data(preview: Card) -> str:
    """Return a data set in a line."""
    size = "×".join(map(str, (preview.channels, *preview.shape)))
    words = [preview.name, f"images of {size}"]
    if len(preview.shape) == 1:
        before = preview.channels - 1
        words[1] = f"blocks of {preview.shape[0]} tokens, each read after {before} others"
    if preview.counts:
        numbers = [f"{preview.images[split]:,} {split}" for split in SPLITS]
        words.append(", ".join(numbers))
    if preview.classes:
        words.append(f"{len(preview.classes)} classes")
    if preview.note:
        words.append(preview.note)
    return "; ".join(words)


def read_matching_data_card(card: Path, source: Any) -> Card | None:
    """Return what the data card says where it is of the same settings."""
    if not card.is_file():
        return None
    try:
        content = read_json(card)
        # Settings that are younger than the card have their defaults in it.
        if type(source).model_validate(content["settings"]) == source:
            return card_of_written_data(content)
    except (UserError, KeyError, TypeError, ValidationError):
        return None  # damaged, or of other code: `prepare` writes it anew
    return None


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
