"""Imports the histories on disk into MLflow; values that it already has are not sent again.

The stages of a method and a seed are children of one parent run. A new training begins a new
parent, so that charts show both; a new measurement replaces the numbers of the parent. Stages
without a single model (data, teachers, transfer of attacks) share one parent.

Modules that import torch are imported in functions: an import without new models does not need it.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from moecore.core.files import UserError, join_below_root
from moecore.core.source_layout import RUNS
from moecore.run import history_file as records
from moecore.run.history_file import ExecutionHistory, HistoryReader, routing_points
from moecore.study.stages import TRAINING_PHASES
from moecore.tracking import mlflow_connection, mlflow_run
from moecore.tracking.mlflow_run import LEVEL_TAG, PARENT_TAG, UID_TAG, StoredRun

OptionalRun = StoredRun | None
FAMILY_TAG = "moecore.family"  # of a parent: "vmoe/0", or SHARED
SHARED = "shared"
DENSE = "dense"  # the method to which headline numbers are relative
IMPORT_COMPLETE_TAG = "moecore.imported.3"  # the run and its parent have the complete history
LOGGED_MODEL_TAG = "moecore.model"  # the folder of the logged model, or why it was not logged
SAVE_DPI = {"dpi": 110}
RUN_NOTE = "Headline numbers, as in the report. The stages, with all their values, are child runs."


class MethodSeedHistories(NamedTuple):
    """All histories of one method and seed, and the trainings of its newest model."""

    method: str  # or SHARED
    seed: int
    histories: list[ExecutionHistory]
    trainings: dict[str, ExecutionHistory]  # phase → training

    @property
    def family(self) -> str:
        if self.method == SHARED:
            return self.method
        return f"{self.method}/{self.seed}"

    def training_tags(self) -> dict[str, str]:
        """Return tag → uid per training; an import finds the parent run by these tags."""
        return {f"moecore.{stage}": run.header["uid"] for stage, run in self.trainings.items()}

    def is_outdated(self, history: ExecutionHistory) -> bool:
        header = history.header
        if header["stage"] in TRAINING_PHASES and self.trainings:
            return history not in self.trainings.values()
        trained = self.trainings.get(header["phase"]) or self.trainings.get("pretrain")
        if trained is None or header["stage"] == "teacher_router":  # which trainings depend on
            return False
        return header["t"] < trained.header["t"]


def group_by_method_and_seed(histories: Iterable[ExecutionHistory]) -> list[MethodSeedHistories]:
    """Group histories by method and seed: dense first, stages without a single model last."""
    groups = defaultdict(list)
    for history in histories:
        method, seed = history.header["method"], history.header["seed"]
        groups[(SHARED, 0) if None in (method, seed) else (method, seed)].append(history)
    generations = [
        MethodSeedHistories(*key, runs, {} if key[0] == SHARED else newest_training_by_phase(runs))
        for key, runs in groups.items()
    ]
    return sorted(generations, key=lambda group: (group.method == SHARED, group.method != DENSE))


def newest_training_by_phase(histories: Iterable[ExecutionHistory]) -> dict[str, ExecutionHistory]:
    """Return phase → newest training, unless it began before the newest pretraining."""
    newest = sorted(
        (run for run in histories if run.header["stage"] in TRAINING_PHASES),
        key=lambda run: (run.run_state()[0] == "RUNNING", run.has_ended, run.header["t"]),
    )
    trainings = {history.header["stage"]: history for history in newest}
    begun = trainings["pretrain"].header["t"] if "pretrain" in trainings else 0.0
    return {stage: run for stage, run in trainings.items() if run.header["t"] >= begun}


CURRENT_TAG = "dvc.current"  # whether a run's stage is up to date, or a parent is the newest
UNTIL_RETRAINED = "until retrained"  # the last parent with numbers, while the newest has none
HEADLINE_NAMES_TAG = "moecore.headline"  # of a parent's numbers, in the view's order
VIEW_KEY = "methods"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"  # MLflow stores views as tags of the experiment
VIEW_NAME = "Methods side by side"


def headline_names(parents: Iterable[StoredRun]) -> list[str]:
    """Return the names of all headline numbers of ``parents``, in the order of the view."""
    lists = [run.tags.get(HEADLINE_NAMES_TAG, "").split() for run in parents]
    return list(dict.fromkeys(chain.from_iterable(sorted(lists, key=len, reverse=True))))


def save_comparison_view(client: Any, experiment: Any, parents: Iterable[StoredRun]) -> None:
    """Save a view of the experiment in MLflow: headline numbers, best score first."""
    # Its charts begin with the score against the next number, which is the score under attack.
    names = headline_names(parents)
    means = [name for name in names if not name.endswith((".lo", ".hi"))]
    # The limits of the first two, the score with and without attack; others can be added by hand.
    shown = names[:6] + [name for name in means if name not in names[:6]]
    widths = {f"metrics.`{name}`": 6 * len(name) + 34 for name in shown}  # pixels
    columns = [*widths, *(f"attributes.`{name}`" for name in ("Dataset", "Source", "Models"))]
    state = {
        "searchFilter": f"tags.{LEVEL_TAG} = 'method' and tags.`{CURRENT_TAG}` != 'false'",
        "orderByKey": columns[0] if names else "attributes.start_time",
        "orderByAsc": not names or not names[0].startswith("acc/"),  # the smallest error first
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
    }
    if len(means) > 1:
        section = {"uuid": VIEW_KEY, "name": f"{means[0]} against {means[1]}", "display": True}
        axes = [{"key": name, "type": "METRIC"} for name in means[:2]]
        chart = {"uuid": VIEW_KEY, "metricSectionId": VIEW_KEY, "type": "SCATTER"}
        chart |= dict(zip(("yaxis", "xaxis"), axes, strict=True))
        state |= {"compareRunSections": [section], "compareRunCharts": [chart]}
        state["isAccordionReordered"] = True  # or sections are sorted by their names
    created = experiment.creation_time
    text = json.dumps({"name": VIEW_NAME, "createdAt": created, "state": json.dumps(state)})
    if experiment.tags.get(VIEW_TAG) != text:
        client.set_experiment_tag(experiment.experiment_id, VIEW_TAG, text)


def view_address(server: str, experiment: Any, mode: str = "TABLE") -> str:
    query = {"workflowType": "machine_learning", "viewStateShareKey": VIEW_KEY}
    query["compareRunsMode"] = mode
    return f"{server}/#/experiments/{experiment.experiment_id}/runs?{urlencode(query)}"


def sync_runs() -> str:
    return describe_import(AllStudiesImporter().import_all())


def describe_import(counts: Counter[str]) -> str:
    done = ", ".join(f"{counts[word]} {word}" for word in ("runs added", "updated", "ended"))
    address = mlflow_connection.mask_password(mlflow_connection.store_address())
    return f"{address}: {done}; {counts['current']} are current"


class AllStudiesImporter:
    """Imports the histories of the project and of all run folders, whenever it is called."""

    def __init__(self) -> None:
        self.readers: dict[Path, HistoryReader] = {}
        self.sent: dict[str, int] = {}  # run id → number of sent lines of its history

    def read_studies(self) -> dict[Path, dict[str, ExecutionHistory]]:
        """Return folder → {uid: history} of each study that has histories."""
        root = mlflow_connection.find_project_root()
        folders = (root, *sorted((root / RUNS).glob("*")))
        read = {folder: records.read_histories(folder, self.readers) for folder in folders}
        return {folder: histories for folder, histories in read.items() if histories}

    def import_all(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        with mlflow_connection.mlflow_import_lock():
            client = mlflow_connection.connect_store()
            with mlflow_connection.mlflow_errors_as_user_errors():
                for study, histories in self.read_studies().items():
                    counts += StudyImporter(client, study, histories, self.sent).import_all()
        return counts


class StudyImporter:
    """One import of a study's histories into its experiment in MLflow."""

    def __init__(
        self, client: Any, study: Path, histories: dict[str, ExecutionHistory], sent: dict[str, int]
    ) -> None:
        self.client = client
        self.study = study
        self.histories = histories
        self.sent = sent
        self.methods = records.allow_packages_and_list_methods(study)
        self.locked = records.list_locked_outputs(study)
        name = mlflow_connection.experiment_name(study)
        self.experiment = mlflow_connection.get_or_create_experiment(client, name)
        # 50,000 is MLflow's limit; runs without a level are not of an import.
        listed = client.search_runs([self.experiment.experiment_id], max_results=50_000)
        runs = [StoredRun(client, run) for run in listed if LEVEL_TAG in run.data.tags]
        self.parents = {run.id: run for run in runs if run.tags[LEVEL_TAG] != "stage"}
        self.runs = {run.tags[UID_TAG]: run for run in runs if run.tags[LEVEL_TAG] == "stage"}
        self.items: dict[tuple[str, int], frozenset[str]] = {}  # by method and seed
        self.counts: Counter[str] = Counter()

    def import_all(self) -> Counter[str]:
        """Import new lines of the study; return the numbers of runs by what was done."""
        shown = set()  # ids of current parents
        ended: list[StoredRun] = []  # since the last import
        dense = set()  # seeds whose dense model has changed: headlines are relative to it
        for generation in group_by_method_and_seed(self.histories.values()):
            parent = self._find_or_create_parent(generation)
            if not self.methods or generation.method in (*self.methods, SHARED):
                shown.add(parent.id)
            runs = [self._import_history(run, generation, parent) for run in generation.histories]
            changed = [run for run in runs if run is not None]
            ended += changed
            if generation.method == DENSE and changed:
                dense.add(generation.seed)
            current = [run for run in generation.histories if not generation.is_outdated(run)]
            finished = (run.subpath for run in current if run.run_state()[0] == "FINISHED")
            self.items[generation.method, generation.seed] = frozenset(finished)
            if generation.method != SHARED and (changed or generation.seed in dense):
                self._send_headline(generation, parent)
            states = [history.run_state() for history in current]
            parent.set_state(*max(states, key=lambda state: (state[0] == "RUNNING", state[1])))
        mark_import_complete(ended)
        self._retire_runs(shown)
        viewed = [run for run in self.parents.values() if run.tags[CURRENT_TAG] != "false"]
        save_comparison_view(self.client, self.experiment, viewed)
        return self.counts

    def _find_or_create_parent(self, generation: MethodSeedHistories) -> StoredRun:
        from moecore.report.figures.drawing import INK, line_style

        training_tags = generation.training_tags()
        fitting = [
            run
            for run in self.parents.values()
            if run.tags.get(FAMILY_TAG) == generation.family
            and all(run.tags.get(name, uid) == uid for name, uid in training_tags.items())
        ]
        if fitting:  # with the most equal trainings, and of these the newest
            shared = training_tags.keys()
            parent = max(fitting, key=lambda run: (len(run.tags.keys() & shared), run.started))
        else:
            method, seed = generation.method, generation.seed
            name = "data and teachers"
            tags = {FAMILY_TAG: generation.family, LEVEL_TAG: SHARED}
            if method != SHARED:
                name = f"{method} seed {seed}"
                listed = method in self.methods
                colour = line_style(self.methods.index(method))["color"] if listed else INK
                tags |= {LEVEL_TAG: "method", "method": method, "seed": seed}
                tags |= {"mlflow.note.content": RUN_NOTE, "mlflow.runColor": colour}
            started = min(history.header["t"] for history in generation.histories)
            parent = self._create_run(name, started, tags)
            self.parents[parent.id] = parent
        parent.set_tags(training_tags)
        return parent

    def _create_run(self, name: str, started: float, tags: Mapping[str, Any]) -> StoredRun:
        texts = {tag: str(value) for tag, value in tags.items() if value is not None}
        experiment = self.experiment.experiment_id
        run = self.client.create_run(experiment, int(started * 1000), tags=texts, run_name=name)
        return StoredRun(self.client, run)

    def _import_history(
        self, history: ExecutionHistory, generation: MethodSeedHistories, newest: StoredRun
    ) -> OptionalRun:
        """Import a stage's history; return its run if it ended since the last import, else None."""
        header = history.header
        run = self.runs.get(header["uid"])
        parent: OptionalRun = newest
        if generation.is_outdated(history):  # it stays with the parent of its model
            parent = self.parents.get(run.tags.get(PARENT_TAG, "")) if run else None
        path = history.folder.relative_to(self.study).as_posix()
        current = parent is newest and history.has_ended
        current = current and (self.locked is None or path in self.locked)
        tags = {CURRENT_TAG: str(current).lower(), PARENT_TAG: parent.id if parent else None}
        done = "updated"
        if run is None:
            done = "runs added"
            parts = [header["stage"], header["phase"], header["method"]]
            if header["seed"] is not None:
                parts.append(f"seed {header['seed']}")
            name = " ".join(part for part in parts if part is not None)
            run = self._create_run(name, header["t"], header_tags(header) | tags)
            self.runs[header["uid"]] = run
        is_complete = run.tags.get(IMPORT_COMPLETE_TAG) == "true"
        if parent is not None and run.tags.get(PARENT_TAG) != parent.id:
            is_complete = False  # the new parent needs the lines, too
            self.sent.pop(run.id, None)
        if not is_complete:
            self.counts[done] += self._send_lines(history, run, parent)
        run.set_tags(tags)
        mlflow_run.point_current_alias(self.client, run, current)
        self.counts["current"] += current
        return run if history.has_ended and not is_complete else None

    def _send_lines(self, history: ExecutionHistory, run: StoredRun, parent: OptionalRun) -> bool:
        """Send the lines of a history that were not sent; return whether there were any."""
        new = history.lines[self.sent.get(run.id, 0) :]
        state, when = history.run_state()
        if not new and state == run.status:
            return False
        params = mlflow_run.select_changed_params(history.header["params"])
        run.add_params(params)
        run.add_points(mlflow_run.training_curve_points(new) + mlflow_run.routing_curve_points(new))
        if any("routing" in line for line in new):
            from moecore.report.figures.model_figures import draw_load_over_steps

            figure = draw_load_over_steps([point for _, point in routing_points(history.lines)])
            self.client.log_figure(run.id, figure, "figures/expert_load.png", save_kwargs=SAVE_DPI)
        for line in new:
            self._send_line(history, line, run)
        phase = history.header["stage"]
        if parent is not None and phase in TRAINING_PHASES:
            parent.add_params(params)
            parent.add_points(mlflow_run.parent_run_curve_points(new, phase))
            parent.set_tags(source_tags(history.header))
            for card in [line["dataset"] for line in new if "dataset" in line]:
                parent.add_dataset(card)
        if state == "FINISHED":
            self._send_model(history, run, parent)
            self._send_figures(history, run)
        run.set_state(state, when)
        self.sent[run.id] = len(history.lines)
        return True

    def _send_line(self, history: ExecutionHistory, line: dict, run: StoredRun) -> None:
        run.set_tags(line.get("tags", {}))
        if "summary" in line:
            stage = history.header["stage"]
            metrics, params = mlflow_run.split_metrics_and_params(stage, line["summary"])
            run.set_numbers(metrics, int(line["t"] * 1000))
            run.add_params(params)
        if "dataset" in line:
            run.add_dataset(line["dataset"])
        if "status" in line:
            run.set_tags({"seconds": line["seconds"], "error": line.get("error")})
        if "file" in line:
            # A stage moves its history at its end from the work folder to the published one.
            places = (history.folder, self.study / "artifacts/history" / history.subpath)
            files = [join_below_root(place, line["file"]) for place in places]
            for file in [file for file in files if file.is_file()][:1]:
                self.client.log_artifact(run.id, str(file), line["file"].split("/")[0])

    def _send_model(self, history: ExecutionHistory, run: StoredRun, parent: OptionalRun) -> None:
        for folder in [line["model"] for line in history.lines if "model" in line][-1:]:
            place = join_below_root(self.study, folder)
            experiment = self.experiment.experiment_id
            header = history.header
            try:
                # A training's model belongs to the parent, whose row shows it by stage.
                stage = header["stage"]
                owner_id = parent.id if parent and stage in TRAINING_PHASES else run.id
                model_id = mlflow_run.log_model(self.client, owner_id, stage, experiment, place)
            except UserError as error:  # DVC restored only the history, or the model is too old
                run.set_tags({LOGGED_MODEL_TAG: f"left out: {error}"})
                return
            for owner in (run, parent) if parent else (run,):
                owner.add_model(model_id)
            parts = (self.experiment.name, header["method"], stage, header["seed"])
            name = ".".join(str(part) for part in parts if part is not None)
            mlflow_run.register_model(self.client, name, model_id, run)
            run.set_tags({LOGGED_MODEL_TAG: str(place)})

    def _send_figures(self, history: ExecutionHistory, run: StoredRun) -> None:
        from moecore.report.report_files import draw_run_figures

        names = []
        try:
            stage = history.header["stage"]
            for name, figure in draw_run_figures(self.study, stage, history.subpath):
                self.client.log_figure(run.id, figure, f"figures/{name}.png", save_kwargs=SAVE_DPI)
                names.append(name)
        except UserError as error:  # the result was removed, or has another version
            names.append(f"left out: {error}")
        run.set_tags({"moecore.figures": ", ".join(names) or None})

    def _send_headline(self, generation: MethodSeedHistories, parent: StoredRun) -> None:
        from moecore.report.report_files import read_model_numbers_for_mlflow

        method, seed = generation.method, generation.seed
        items = {name: self.items.get((name, seed), frozenset()) for name in (method, DENSE)}
        numbers, counts = read_model_numbers_for_mlflow(self.study, method, seed, items)
        parent.set_numbers(numbers, int(time.time() * 1000))
        parent.add_params(counts)
        names = dict.fromkeys([*numbers, *headline_names([parent])])
        parent.set_tags({HEADLINE_NAMES_TAG: " ".join(names) or None})

    def _retire_runs(self, shown: set[str]) -> None:
        """Tag replaced runs, and runs without history, as not current."""
        # A replaced parent stays in the view until its successor has its first number, the score.
        newest = {self.parents[run_id].tags[FAMILY_TAG]: self.parents[run_id] for run_id in shown}
        for run in self.parents.values():
            current = str(run.id in shown).lower()
            successor = newest.get(run.tags[FAMILY_TAG], run)
            was_shown = run.tags.get(CURRENT_TAG, "false") != "false"
            missing = set(headline_names([run])[:1]) - set(headline_names([successor]))
            run.set_tags({CURRENT_TAG: UNTIL_RETRAINED if was_shown and missing else current})
            if run.id not in shown and run.status == "RUNNING":
                run.set_state("KILLED", time.time())
        for run in [run for uid, run in self.runs.items() if uid not in self.histories]:
            run.set_tags({CURRENT_TAG: "false"})
            writer = (run.tags["host"], int(run.tags["pid"]), run.started)
            if run.status == "RUNNING" and not records.is_process_running(*writer):
                run.set_state("KILLED", time.time())
                self.counts["ended"] += 1


def mark_import_complete(runs: list[StoredRun]) -> None:
    for run in runs:
        run.set_tags({IMPORT_COMPLETE_TAG: "true"})


def header_tags(header: Mapping[str, Any]) -> dict[str, Any]:
    names = ("stage", "method", "seed", "phase", "params_hash", "host", "pid", "python")
    tags = {UID_TAG: header["uid"], LEVEL_TAG: "stage", "dvc.stage": header["dvc_stage"]}
    versions = header.get("versions", {})  # missing in older histories
    tags |= {f"version.{name}": version for name, version in versions.items()}
    return {name: header[name] for name in names} | tags | source_tags(header)


def source_tags(header: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": header["command"],
        "mlflow.source.git.commit": header["commit"],
        "mlflow.source.git.dirty": header["dirty"],
    }
