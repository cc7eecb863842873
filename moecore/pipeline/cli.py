"""The command line ``moecore``: one thin function per command."""

import os
import sys
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from moecore.core.files import UserError, write_json
from moecore.pipeline import command_group, pull
from moecore.pipeline.lens_commands import lens_engine, lens_read, lens_record

CURRENT_FOLDER = Path()
PARAMS_FILE = Path("params.yaml")
SCHEMA_FILE = Path("params.schema.json")
QUICK = "quick"
QUESTION_HELP = "a question, such as tgr/table_3"
SET_HELP = "write a value into params.yaml first, such as -S pretrain.epochs=3; may be repeated"
JOBS_HELP = "stages at a time; left out: the number of GPUs, else of cores, at most 4"
ROUND_HELP = "of the question's rounds; left out: the last"
QuestionName = Annotated[str | None, Argument(help=QUESTION_HELP)]
QuestionNames = Annotated[list[str] | None, Argument(help=QUESTION_HELP)]
Question = Annotated[str, Argument(help=QUESTION_HELP)]
RoundNumber = Annotated[int | None, Option("--round", min=1, help=ROUND_HELP)]
JobCount = Annotated[int | None, Option(min=1, help=JOBS_HELP)]
SetValues = Annotated[list[str] | None, Option("--set", "-S", metavar="KEY=VALUE", help=SET_HELP)]
IsVerbose = Annotated[bool, Option("--verbose", help="print DVC's own lines, and no table")]
ParamsFile = Annotated[Path, Argument(help="the params.yaml")]
DATA_HELP = "a folder of pictures, one folder per class; settings are derived from its files"
OwnData = Annotated[Path | None, Option("--data", metavar="FOLDER", help=DATA_HELP)]
GRID = "run a method per value of -S 'methods.vmoe.router.k=[1,2,4]'; several -S: their product"
Sweep = Annotated[bool, Option("--sweep", help=GRID)]
TYPER_OPTIONS: dict[str, Any] = {
    "cls": command_group.CommandGroup,
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,  # a bug shows Python's own traceback
    "rich_markup_mode": None,
}
study_app = typer.Typer(help="The questions below pipelines/.", **TYPER_OPTIONS)
claims_app = typer.Typer(help="The papers' claims, over all studies.", **TYPER_OPTIONS)
lens_app = typer.Typer(help="Routing of any model: record it, and look at it.", **TYPER_OPTIONS)


def _build_app() -> typer.Typer:
    program = typer.Typer(help="Sparse vision mixture-of-experts models.", **TYPER_OPTIONS)
    for name, group in {"study": study_app, "claims": claims_app, "lens": lens_app}.items():
        program.add_typer(group, name=name)
    program.command("pull")(pull.pull_command)
    for name, command in (("record", lens_record), ("read", lens_read), ("engine", lens_engine)):
        lens_app.command(name)(command)
    return program


app = _build_app()
PASS_ON_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"moecore {version('moecore')}")
        raise typer.Exit


ShowVersion = Annotated[
    bool, Option("--version", callback=print_version, is_eager=True, help="Show it and exit.")
]


@app.callback()
def declare_global_options(show_version: ShowVersion = False) -> None:
    """Declare the options of ``moecore`` itself."""


@app.command("check")
def check_command(params: ParamsFile = PARAMS_FILE) -> None:
    """Validate all of params.yaml; print every problem with file, line, column and key."""
    from moecore.report.tables.metrics_by_method import unanswerable_claims
    from moecore.study.check import check_and_describe

    typer.echo(check_and_describe(params, also=unanswerable_claims))
    print_changed_raw_data(params)


@app.command("plan")
def plan_command() -> None:
    """Print which stages would run, why, and how long they took the last time.

    Stages that run only if an earlier output changes are listed separately. Total durations are for
    one stage at a time; `moecore run` runs several. Works while stages run.
    """
    from moecore.pipeline.plan import print_plan

    print_changed_raw_data(PARAMS_FILE)
    print_plan()


@app.command("pilot")
def pilot_command(
    study: Annotated[str, Argument(help="a params.yaml, its folder, or a question")] = ".",
    seeds: Annotated[int, Option(min=2, help="trainings of each method")] = 3,
) -> None:
    """Print whether a params.yaml is worth a study: whether routing can help on its data.

    It trains a few methods on one CPU thread, and compares validation scores. Routing can help if
    perfect routing beats dense and learned routing, or V-MoE beats the hash, by the margins that
    are printed. Exits with 1 if it is not worth a study, also if a training takes over 90 s.
    """
    from moecore.pipeline import pilot

    path = Path(study)
    if path.is_dir():
        path /= PARAMS_FILE
    elif not path.is_file() or path.name != str(PARAMS_FILE):
        from moecore.pipeline.run_folders import write_run_folder
        from moecore.study.questions import find_question

        question_round = find_question(CURRENT_FOLDER, study).round(None)
        write_run_folder(question_round)
        path = question_round.folder / PARAMS_FILE
    result = pilot.run_pilot(path, seeds)
    verdicts = pilot.pilot_verdicts(result)
    pilot.print_pilot(result, verdicts)
    raise typer.Exit(0 if pilot.study_kinds_worth_running(verdicts) else 1)


@app.command("run")
def run_command(
    jobs: JobCount = None,
    sets: SetValues = None,
    data: OwnData = None,
    sweep: Sweep = False,
    verbose: IsVerbose = False,
) -> None:
    """Run all stages that are not up to date, several at a time: `dvc repro` in parallel.

    With --data or --sweep in a folder below .runs/; the params.yaml here stays as it is.
    """
    folder = CURRENT_FOLDER
    if data is not None or sweep:
        from moecore.pipeline.run_folders import write_data_or_sweep_run

        folder = write_data_or_sweep_run(data, sets or (), sweep)
        sets = None
    with chdir(folder):
        _run_stages(jobs, sets, verbose)
    print_run_result(folder)


def _run_stages(jobs: int | None, sets: list[str] | None, verbose: bool) -> None:
    from moecore.pipeline.code_hashes import digest_code_inputs, is_code_up_to_date
    from moecore.pipeline.parallel import run_pipeline
    from moecore.pipeline.project_record import hold_project_lock
    from moecore.study.yaml_document import load_yaml_document

    load_yaml_document(PARAMS_FILE)  # fails before anything is written, outside a project
    with hold_project_lock():  # before -S is written
        if sets:
            from moecore.study.params_writer import write_assignments

            for line in write_assignments(PARAMS_FILE, sets) or ["nothing changes"]:
                typer.echo(f"{PARAMS_FILE}: {line}")
        document = load_yaml_document(PARAMS_FILE)
        if not is_code_up_to_date(digest_code_inputs(document), document):  # else `code` checked it
            from moecore.report.tables.metrics_by_method import unanswerable_claims
            from moecore.study.check import check_study

            for line in check_study(also=unanswerable_claims).untried:
                typer.echo(line)
        print_changed_raw_data(PARAMS_FILE)
        run_pipeline(jobs, verbose)


def print_run_result(folder: Path) -> None:
    from moecore.report.tables.terminal_summary import print_run_summary

    if (compared := folder / "reports/compare.json").is_file():
        print_run_summary(compared)


@app.command("quick")
def quick_command(jobs: JobCount = None, verbose: IsVerbose = False) -> None:
    """Run a first study in about a minute: how much of the value of routing does V-MoE find?"""
    from moecore.pipeline.project_files import QUICK_QUESTION, write_quick_project
    from moecore.study.questions import list_question_names

    if QUICK_QUESTION in list_question_names(CURRENT_FOLDER):
        study_run(QUICK_QUESTION, jobs=jobs, verbose=verbose)
    else:
        folder = write_quick_project(CURRENT_FOLDER)
        with chdir(folder):
            _run_stages(jobs, None, verbose)
        print_run_result(folder)


@app.command("new")
def new_command(
    name: Annotated[str, Argument(help="of the project and its package: letters, digits, _")],
    folder: Annotated[Path | None, Argument(help="empty or new; default: of that name")] = None,
    study: Annotated[str, Option("--from", help="the first question; main: six methods")] = QUICK,
    data: OwnData = None,
    overlay: Annotated[
        bool, Option("--overlay", help="params.yaml is written from what differs from ours")
    ] = False,
) -> None:
    """Begin a project: settings, stages, an example router with a test, a Makefile."""
    from moecore.pipeline.project_files import begin_project, describe_first_run

    place = folder or Path(name)
    begin_project(name, place, study, overlay, data)
    first_run = describe_first_run(place)
    typer.echo(f"{place}: begun from {data or study}; edit params.yaml, then {first_run}")


@app.command("upgrade")
def upgrade_command(
    yes: Annotated[bool, Option("--yes", help="write it; left out: only print it")] = False,
    stage: Annotated[list[str] | None, Option(help="add it to dvc.yaml; repeatable")] = None,
) -> None:
    """Upgrade a project to the installed version: show the diff, and which stages run again."""
    from moecore.pipeline.project_files import upgrade_project
    from moecore.pipeline.project_record import hold_project_lock, read_answers

    answers = read_answers(Path())
    with hold_project_lock():
        upgrade_project(answers, yes, stage or ())


@app.command("ui")
def ui_command(port: Annotated[int, Option(min=1, max=65535, help="on 127.0.0.1")] = 5000) -> None:
    """Serve MLflow's pages, and import new results from disk continuously."""
    from moecore.tracking.ui import serve_ui

    raise typer.Exit(serve_ui(port))


@app.command("sync")
def sync_command() -> None:
    """Import all runs into MLflow."""
    from moecore.tracking.sync import sync_runs

    typer.echo(sync_runs())


@app.command("export")
def export_command(
    model: Annotated[Path, Argument(help="folder of a trained model")],
    to: Annotated[Literal["onnx", "torch"], Option(help="ONNX, or torch.export's program")],
    out: Annotated[Path, Option(help="the file, such as model.onnx or model.pt2")],
    records: Annotated[bool, Option(help="with the routing records among its outputs")] = False,
    package: Annotated[list[str] | None, Option(help="with parts of it; repeatable")] = None,
) -> None:
    """Write a trained model as one file that runs without moecore."""
    from moecore.predict.export import export_model

    typer.echo(export_model(model, to, out, records, package or ()))


@app.command("robustbench")
def robustbench_command(
    model: Annotated[Path, Argument(help="folder of a trained model")],
    data: Annotated[Path, Option(help="prepared folder, such as artifacts/data/pretrain")],
    eps: Annotated[str, Option(help="radius, of pixels in [0, 1]")] = "8/255",
    norm: Annotated[Literal["Linf", "L2"], Option(help="of the radius")] = "Linf",
    images: Annotated[int, Option(min=1, help="the first of the test split")] = 1000,
    out: Annotated[Path, Option(help="the JSON file")] = Path("robustbench.json"),
) -> None:
    """Attack a model by AutoAttack, and write its entry for RobustBench's leaderboard."""
    from moecore.predict.robustbench import attack_and_write_robustbench_entry

    typer.echo(attack_and_write_robustbench_entry(model, data, eps, norm, images, out))


@app.command("conform")
def conform_command(
    target: Annotated[
        str, Argument(help="a router's kind, a method, PACKAGE.MODULE:NAME, FILE.py")
    ],
    json_file: Annotated[Path | None, Option("--json", help="the verdicts, as JSON")] = None,
    out: Annotated[Path, Option(help="of verdicts, failures, page")] = Path("conformance"),
) -> None:
    """Print which laws of mixtures a layer keeps, ours or not; exits with 1 if it breaks one."""
    from moecore.pipeline.conform import check_target_and_store_verdicts

    raise typer.Exit(0 if check_target_and_store_verdicts(target, json_file, out) else 1)


@app.command("schema")
def schema_command() -> None:
    """Write params.schema.json, with which editors complete and document every key."""
    from moecore.core.source_layout import allow_packages
    from moecore.study.check import params_schema
    from moecore.study.yaml_document import load_yaml_document

    document = load_yaml_document(PARAMS_FILE)
    allow_packages(document.packages, document.folders)
    try:
        schema = params_schema()
    except ValueError as error:
        raise UserError(f"{PARAMS_FILE}: {error}") from None
    write_json(SCHEMA_FILE, schema)
    typer.echo(f"{SCHEMA_FILE}: written")


@app.command("predict", context_settings=PASS_ON_ARGS)
def predict_command(context: typer.Context) -> None:
    """Predict what pictures or volumes show, with a trained model; see `--help`."""
    os.execv(sys.executable, [sys.executable, "-m", "moecore.pipeline.predict_cli", *context.args])


@app.command("tune")
def tune_command(name: Question, jobs: JobCount = None, verbose: IsVerbose = False) -> None:
    """Choose the learning rate of every method of a question, on validation images.

    Trains each method with each rate under `tune:` of the question's file, in .runs/, and keeps
    scores, curves and choices in pipelines/results/, from where the question takes them.
    """
    from moecore.pipeline.tune import list_edge_choices, print_tuned_rates, tune_question
    from moecore.study.questions import find_question

    question = find_question(CURRENT_FOLDER, name)
    stored = tune_question(question, lambda: _run_stages(jobs, None, verbose))
    print_tuned_rates(stored)
    typer.echo(f"{question.results_path}: written")
    if problems := "\n".join(list_edge_choices(question, stored)):
        raise UserError(problems)


@study_app.command("write")
def study_write(name: QuestionName = None, number: RoundNumber = None) -> None:
    """Write a question round's folder in .runs/; print what changes in the params.yaml there.

    Without a name: in a project with an overlay.yaml, write params.yaml and dvc.yaml from it; in a
    clone of moecore, write dvc.yaml from the table of stages (moecore/study/stages.py).
    """
    from moecore.pipeline.run_folders import write_project_from_overlay, write_run_folder
    from moecore.study.questions import find_question

    if name is None:
        for line in write_project_from_overlay():
            typer.echo(f".: {line}")
        return
    question_round = find_question(CURRENT_FOLDER, name).round(number)
    for line in write_run_folder(question_round) or ["nothing changes"]:
        typer.echo(f"{question_round.folder}: {line}")


@study_app.command("new")
def study_new(name: Annotated[str, Argument(help="small letters, digits and _")]) -> None:
    """Begin a question: write pipelines/ours/NAME.yaml to edit; never overwrite a file."""
    from moecore.pipeline.run_folders import begin_question

    typer.echo(f"{begin_question(name)}: edit it, then `moecore study run ours/{name}`")


@study_app.command("preset")
def study_write_with_presets(
    name: Question,
    names: Annotated[list[str] | None, Argument(help="presets, in this order")] = None,
    number: Annotated[int, Option("--round", min=1, help="of the question's rounds")] = 1,
) -> None:
    """Write a question's run folder with named presets of settings; without names: list presets."""
    from moecore.pipeline.run_folders import write_run_folder
    from moecore.study.questions import find_question

    question = find_question(CURRENT_FOLDER, name)
    if not names:
        typer.echo("\n".join(question.presets) or "no presets")
        return
    question_round = question.round(number)
    folder = question_round.folder
    for line in write_run_folder(question_round, names) or ["nothing changes"]:
        typer.echo(line)
    typer.echo(f"{folder}: written; to run it: cd {folder} && moecore run")


@study_app.command("run")
def study_run(
    name: Question,
    number: RoundNumber = None,
    jobs: JobCount = None,
    sets: SetValues = None,
    verbose: IsVerbose = False,
) -> None:
    """Write a question's folder, run its stages that are not up to date, and store its results."""
    from moecore.pipeline.run_folders import explain_stale_results, store_results, write_run_folder
    from moecore.pipeline.tune import list_tuning_problems
    from moecore.study.questions import find_question

    question = find_question(CURRENT_FOLDER, name)
    question_round = question.round(number)
    if problems := "\n".join(list_tuning_problems(question)):
        raise UserError(problems)
    if len(question.rounds) > 1:
        of = f"round {question_round.number} of {len(question.rounds)}"
        typer.echo(f"{question.name}: {of}; another one: --round NUMBER")
    for line in write_run_folder(question_round):
        typer.echo(f"{question_round.folder}: {line}")
    with chdir(question_round.folder):
        _run_stages(jobs, sets, verbose)
    if reason := explain_stale_results(question_round):
        typer.echo(f"{question.results_path}: left as it is: {reason}")
    else:
        typer.echo(f"{store_results(question_round)}: written")
    print_run_result(question_round.folder)


@study_app.command("keep")
def study_keep(name: Question, number: RoundNumber = None) -> None:
    """Copy the results of a question, which ran in its folder, to pipelines/results/."""
    from moecore.pipeline.run_folders import store_results
    from moecore.study.questions import find_question

    typer.echo(f"{store_results(find_question(CURRENT_FOLDER, name).round(number))}: written")


@study_app.command("check")
def study_check(
    names: QuestionNames = None,
    check_all: Annotated[bool, Option("--all", help="all questions of pipelines/")] = False,
) -> None:
    """Validate all rounds and presets of questions; train a tiny model per method for one step."""
    from moecore.pipeline.run_folders import check_and_add_problems
    from moecore.pipeline.tune import list_tuning_problems
    from moecore.study.questions import find_question, load_questions

    if not (names or check_all):
        raise UserError("found no question; allowed: names of questions, or --all")
    problems = []
    chosen = (find_question(CURRENT_FOLDER, name) for name in names or ())
    for question in load_questions(CURRENT_FOLDER) if check_all else chosen:
        known = len(problems)
        for line in check_and_add_problems(question, problems):
            typer.echo(line)
        for line in list_tuning_problems(question) if len(problems) == known else ():
            typer.echo(line)
    if problems:
        raise UserError("\n".join(problems))


@claims_app.command("check")
def verify_claim_intervals_and_dates() -> None:
    """Recompute intervals from stored scores; print the commits that asked and answered claims."""
    from moecore.report.claims import items_and_dates
    from moecore.study.questions import load_rounds

    rounds = load_rounds(CURRENT_FOLDER)
    for question_round in rounds:
        if number := items_and_dates.verify_stored_items(question_round):
            typer.echo(f"{question_round.name}: {number} intervals follow from the stored items")
    is_whole = items_and_dates.has_full_git_history(CURRENT_FOLDER)
    earlier = items_and_dates.read_replaced_answers_file(CURRENT_FOLDER)
    for question_round in rounds if is_whole else ():
        dated = items_and_dates.find_question_commits(question_round)
        for question in dated:
            typer.echo(f"{question_round.name}: {question.line}")
        if late := "; ".join(question.line for question in dated if question.is_refused):
            problem = "asked in no commit before the commit of its answer"
            raise UserError(f"{question_round.name}: {problem}: {late}")
        for line in items_and_dates.find_overwritten_answers(question_round, earlier):
            typer.echo(f"{question_round.name}: {line}")
        for line in items_and_dates.find_reused_seeds(question_round, earlier):
            typer.echo(f"{question_round.name}: {line}")
    if not is_whole:
        typer.echo("when claims were asked is not known: git has no history here, or a part of it")


@claims_app.command("plan")
def plan_claim_sample_sizes() -> None:
    """Print how many seeds or items a table needs for intervals of ± half the paper's effects."""
    from moecore.report.claims.answers import collect_corrected_answers, describe_required_samples
    from moecore.study.questions import load_rounds

    studies, answers = collect_corrected_answers(load_rounds(CURRENT_FOLDER))
    for line in describe_required_samples(answers, studies):
        typer.echo(line)


def print_changed_raw_data(params: Path) -> None:
    from moecore.pipeline.plan import describe_changed_raw_data

    for line in describe_changed_raw_data(params):
        typer.echo(line)


if __name__ == "__main__":
    app()
