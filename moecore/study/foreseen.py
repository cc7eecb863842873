"""Everything that can be known before anything runs: the file, its data, its models."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError
from moecore.study.data_rules import as_in_stages, data_problems, pair_rules, previews_of, said
from moecore.study.document import Document, load
from moecore.study.mistakes import cut
from moecore.study.model_rules import model_rules
from moecore.study.overlay import stages_of
from moecore.study.problems import line_of
from moecore.study.study import Study
from moecore.study.training_rules import size_rules, unneeded, untrained_routers
from moecore.study.whole import looked_through

# What a room above this one has to say of a study and its stages: keys, and what is wrong.
Also = Callable[[Study, Sequence[str]], Iterable[tuple[tuple, str]]]


class Foreseen(NamedTuple):
    """A params.yaml that is in order."""

    study: Study
    notes: tuple[str, ...]  # a line for each data set, and what is better known beforehand
    seen: tuple[Path, ...]  # what was looked at beside the file, whether it is there or not


def foresee(
    path: str | Path = "params.yaml", home: Path | None = None, also: Also | None = None
) -> Foreseen:
    """Validate the file, open its data sources (headers and counts) and build its models.

    home: the folder in which its stages run; left out, that of the file. also: see ``in_order``.
    Raises UserError with one line per problem: those of the file in its order, then those of data
    and models.
    """
    document = load(str(path))
    stages = stages_of(Path(path).parent)
    study, problems = looked_through(document, stages)
    if study is None:
        raise UserError(cut(problems))
    with as_in_stages(Path(path).parent if home is None else home):
        previews = previews_of(study)
    missing = list(_lines(document, data_problems(previews, document.data.get("data", {}))))
    found = [*pair_rules(study, previews), *size_rules(study, previews)]
    if not problems:  # of a file with mistakes, models would be wrong for the same reasons
        found += model_rules(study, previews)
        if also is not None and not found:  # it reads what all these rules have held good
            problems += _lines(document, also(study, stages))
    others = list(_lines(document, found))
    if missing and not problems and not others:
        others = [f"{document.path}: all else is in order"]
    if lines := [*problems, *missing, *others]:
        raise UserError(cut(lines))
    notes = [f"data.{phase}: {said(preview)}" for phase, preview in previews.items()]
    notes += [line for line in (unneeded(study), untrained_routers(study)) if line is not None]
    return Foreseen(study, tuple(notes), _seen(preview.seen for preview in previews.values()))


def _lines(document: Document, found: Iterable[tuple[tuple, str]]) -> Iterator[str]:
    for keys, text in found:
        yield line_of(document, keys, text)


def _seen(paths: Iterable[tuple[Path, ...]]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path for some in paths for path in some))
