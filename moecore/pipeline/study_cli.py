"""The commands ``moecore run`` and ``moecore study``."""

from contextlib import chdir
from pathlib import Path
from typing import Annotated

import typer

from moecore.core.files import UserError

JobCount = Annotated[
    int | None,
    typer.Option(
        min=1, help="stages at a time; left out: the number of GPUs, else of cores, at most 4"
    ),
]
SetValues = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-S",
        metavar="KEY=VALUE",
        help="write a value into params.yaml first, such as -S pretrain.epochs=3; may be repeated",
    ),
]
QUESTION = "a question, such as tgr/table_3"
QuestionName = Annotated[str | None, typer.Argument(help=QUESTION)]
RoundNumber = Annotated[
    int | None, typer.Option("--round", min=1, help="of the question's rounds; left out: the last")
]
HERE = Path()
PARAMS_FILE = Path("params.yaml")


def run_command(jobs: JobCount = None, sets: SetValues = None) -> None:
    """Run all that is not up to date, several stages at a time: `dvc repro` in parallel."""
    from moecore.pipeline.parallel import run_pipeline
    from moecore.pipeline.project import hold_project
    from moecore.report.tables.metrics_by_method import unfit_metric_problems
    from moecore.study.check import check_study
    from moecore.study.document import load_yaml_document

    load_yaml_document(PARAMS_FILE)  # nothing is written where there is no project
    with hold_project():  # who is refused has written nothing
        if sets:
            from moecore.study.params_file import write_assignments

            for line in write_assignments(PARAMS_FILE, sets) or ["nothing changes"]:
                typer.echo(f"{PARAMS_FILE}: {line}")
        for line in check_study(also=unfit_metric_problems).untried:
            typer.echo(line)
        say_changed_raw_data(PARAMS_FILE)
        run_pipeline(jobs)


def study_write(name: QuestionName = None, number: RoundNumber = None) -> None:
    """Write the folder in which a question runs, below .runs/; says what changes.

    Without a name: params.yaml and dvc.yaml of a project that has an overlay.yaml.
    """
    from moecore.pipeline.study_runs import write_project, write_run
    from moecore.study.questions import find_question

    if name is None:
        for line in write_project():
            typer.echo(f".: {line}")
        return
    one = find_question(HERE, name).round(number)
    for line in write_run(one) or ["nothing changes"]:
        typer.echo(f"{one.folder}: {line}")


def study_new(name: Annotated[str, typer.Argument(help="small letters, digits and _")]) -> None:
    """Begin a question: a file pipelines/ours/NAME.yaml to edit, written once."""
    from moecore.pipeline.study_runs import begin_question

    typer.echo(f"{begin_question(name)}: edit it, then `moecore study run ours/{name}`")


def study_preset(
    name: Annotated[str, typer.Argument(help=QUESTION)],
    names: Annotated[list[str] | None, typer.Argument(help="presets, in this order")] = None,
    number: RoundNumber = 1,
) -> None:
    """Write a question's folder with presets, of its first round; without names: list them."""
    from moecore.pipeline.study_runs import write_run
    from moecore.study.questions import find_question

    question = find_question(HERE, name)
    if not names:
        typer.echo("\n".join(question.presets) or "it has no presets")
        return
    one = question.round(number)
    for line in write_run(one, names) or ["nothing changes"]:
        typer.echo(line)
    typer.echo(f"{one.folder}: written; to run it: cd {one.folder} && moecore run")


def study_run(
    name: Annotated[str, typer.Argument(help=QUESTION)],
    number: RoundNumber = None,
    jobs: JobCount = None,
    sets: SetValues = None,
) -> None:
    """Write the folder in which a question runs, run all of it that is not up to date, and keep
    its results.
    """
    from moecore.pipeline.study_runs import keep_results, why_results_stay, write_run
    from moecore.study.questions import find_question

    question = find_question(HERE, name)
    one = question.round(number)
    if len(question.rounds) > 1:
        of = f"round {one.number} of {len(question.rounds)}"
        typer.echo(f"{question.name}: {of}; another one: --round NUMBER")
    for line in write_run(one):
        typer.echo(f"{one.folder}: {line}")
    with chdir(one.folder):
        run_command(jobs, sets)
    if reason := why_results_stay(one):
        typer.echo(f"{one.results}: left as it is: {reason}")
    else:
        typer.echo(f"{keep_results(one)}: written")


def study_keep(
    name: Annotated[str, typer.Argument(help=QUESTION)], number: RoundNumber = None
) -> None:
    """Keep the results of a question that `dvc repro` or `moecore run` ran in its folder."""
    from moecore.pipeline.study_runs import keep_results
    from moecore.study.questions import find_question

    typer.echo(f"{keep_results(find_question(HERE, name).round(number))}: written")


def study_check(
    names: Annotated[list[str] | None, typer.Argument(help=QUESTION)] = None,
    every: Annotated[bool, typer.Option("--all", help="all questions of pipelines/")] = False,
) -> None:
    """Validate every round and preset of questions, and try a small step of their methods."""
    from moecore.pipeline.study_runs import check_question
    from moecore.study.questions import find_question, load_questions

    if not (names or every):
        raise UserError("found no question; allowed: names of questions, or --all")
    questions = load_questions(HERE) if every else [find_question(HERE, one) for one in names or ()]
    problems = []
    for question in questions:
        for line in check_question(question, problems):
            typer.echo(line)
    if problems:
        raise UserError("\n".join(problems))


def study_index() -> None:
    """Write pipelines/README.md: each folder's questions, with answers and commands."""
    from moecore.report.claims.study_index import write_study_index

    typer.echo(f"{write_study_index()}: written")


def say_changed_raw_data(params: Path) -> None:
    """Print which raw data changed since they were prepared."""
    from moecore.pipeline.plan import describe_changed_raw_data

    for line in describe_changed_raw_data(params):
        typer.echo(line)
