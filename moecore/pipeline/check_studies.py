"""The check of questions before any of their rounds runs."""

from collections.abc import Iterator

from moecore.core.files import UserError
from moecore.report.tables.metrics_by_method import unfit_metric_problems
from moecore.study.check import MissingData, check_study_document, format_misfits
from moecore.study.questions import QuestionFile, Round
from moecore.study.study import read_study
from moecore.study.trial_rules import trial_step_misfits


def check_question(question: QuestionFile, problems: list[str]) -> Iterator[str]:
    """Yield a line for each round of a question, and one for its presets; fill ``problems``.

    Of a round everything is tried that ``moecore check`` tries, and a small step of the methods
    that it does not run, too; of presets, which may lie over each other, whether they can be read.
    """
    for one in question.rounds:
        try:
            yield f"{one.name}: {_check_round(one)}"
        except UserError as error:
            problems.append(str(error))
    for name in question.presets:
        try:
            read_study(question.rounds[0].compose([name]).document)
        except UserError as error:
            problems.append(str(error))
    if question.presets:
        yield f"{question.name}: {len(question.presets)} presets"


def _check_round(one: Round) -> str:
    """Return whether a round is in order; raises UserError where it is not.

    Paths of data count from a folder as deep as that in which it runs.
    """
    document, _, stages = one.compose()
    home = one.folder if one.folder.is_dir() else one.question.path.parent
    try:
        study = check_study_document(document, stages, home, unfit_metric_problems).study
        data = ""
    except MissingData:
        study = read_study(document)
        data = ", but its data are not here"
    others = tuple(name for name in study.methods if name not in study.run.methods)
    untried = study.model_copy(update={"run": study.run.model_copy(update={"methods": others})})
    if faults := format_misfits(document, trial_step_misfits(untried)):
        raise UserError("\n".join(faults))
    return f"in order{data}"
