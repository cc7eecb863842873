"""Everything that can be known before anything runs: the file, its data, its models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError
from moecore.data.sources.base import PlannedData
from moecore.study.check import format_misfits, read_study_and_problems
from moecore.study.data_rules import (
    chdir_to_stages,
    data_problems,
    data_source_key_path,
    describe_planned_data,
    load_previews,
    misfits_with_pretrain_images,
)
from moecore.study.document import Document, cap_line_count, load_yaml_document
from moecore.study.layers import list_folder_stages
from moecore.study.method_rules import unused_stem_note
from moecore.study.model_rules import model_misfits, paper_model_misfits, reduction_misfits
from moecore.study.study import Study
from moecore.study.training_rules import (
    few_class_misfits,
    gradientless_router_note,
    image_view_misfits,
    training_image_misfits,
    unused_teacher_note,
)
from moecore.study.trial_rules import (
    outside_part_misfits,
    outside_source_misfits,
    trial_step_misfits,
)

# What a room above this one has to say of a study, its stages and data: keys, and what is wrong.
ExtraCheck = Callable[
    [Study, Sequence[str], Mapping[str, PlannedData]], Iterable[tuple[tuple, str]]
]


class MissingData(UserError):
    """Nothing is wrong but that data are not on this machine, or cannot be read."""


class CheckedStudy(NamedTuple):
    """A params.yaml that is in order."""

    study: Study
    notes: tuple[str, ...]  # a line for each data set, and what is better known beforehand
    untried: tuple[str, ...]  # a line for each part from outside that could not be tried in small


def check_study(
    path: str | Path = "params.yaml", home: Path | None = None, also: ExtraCheck | None = None
) -> CheckedStudy:
    """Validate the file, open its data sources (headers and counts) and build its models.

    home: the folder in which its stages run; left out, that of the file. Raises UserError with one
    line per problem: those of the file in its order, then those of data and models.
    """
    folder = Path(path).parent
    document, stages = load_yaml_document(path), list_folder_stages(folder)
    return check_study_document(document, stages, folder if home is None else home, also)


def check_study_document(
    document: Document, stages: Sequence[str], home: Path, also: ExtraCheck | None = None
) -> CheckedStudy:
    """Validate a whole params.yaml for these stages, which run in ``home``, as ``check_study``."""
    study, problems = read_study_and_problems(document, stages)
    if study is None:
        raise UserError(cap_line_count(problems))
    untried: list[str] = []
    with chdir_to_stages(home):
        if faults := list(outside_source_misfits(study, untried)):
            raise UserError(cap_line_count([*problems, *format_misfits(document, faults)]))
        previews = load_previews(study)
    missing = format_misfits(document, data_problems(previews, document.data))
    others = [
        *misfits_with_pretrain_images(study, previews),
        *training_image_misfits(study, previews),
        *image_view_misfits(study, previews),
        *few_class_misfits(study, previews),
    ]
    if not problems:  # of a file with mistakes, models would be wrong for the same reasons
        others += model_misfits(study, previews)
        others += paper_model_misfits(study)
        others += reduction_misfits(study, previews)
        if not others:
            others += outside_part_misfits(study, previews, untried)
            others += trial_step_misfits(study, [keys for keys, _ in others])
        if also is not None and not others:  # it reads what all these rules have held good
            others += also(study, stages, previews)
    lines = [*problems, *missing, *format_misfits(document, others)]
    if missing and len(lines) == len(missing):
        raise MissingData(cap_line_count([*lines, f"{document.path}: all else is in order"]))
    if lines:
        raise UserError(cap_line_count(lines))
    notes = [
        f"{'.'.join(data_source_key_path(phase))}: {describe_planned_data(preview)}"
        for phase, preview in previews.items()
    ]
    known = (unused_teacher_note, gradientless_router_note, unused_stem_note)
    notes += [note for tell in known if (note := tell(study))]
    return CheckedStudy(study, tuple(notes), tuple(untried))


def check_and_describe_study(
    path: str | Path = "params.yaml", home: Path | None = None, also: ExtraCheck | None = None
) -> str:
    """Return ``params.yaml: in order (…)`` and a line per data set; raises like ``check_study``."""
    study, notes, untried = check_study(path, home, also)
    trained = "nothing is trained"
    if study.run.methods:
        seeds = ", ".join(map(str, study.run.seeds))
        trained = f"{', '.join(study.run.methods)}; seeds {seeds}"
    return "\n".join(
        [f"{path}: in order ({trained})", *(f"  {note}" for note in (*notes, *untried))]
    )
