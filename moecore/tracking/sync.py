"""All histories into MLflow, idempotently: what it has is left alone, what it lacks is added.

What brings torch is imported where it is needed: an import without new models does without.
"""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecore.core.files import UserError, join_below_root
from moecore.core.source_layout import RUNS
from moecore.run import history_file as records
from moecore.run.history_file import ExecutionHistory, GrowingHistory, routing_points
from moecore.tracking import mlflow_connection
from moecore.tracking import model as models
from moecore.tracking.stored_run import (
    LEVEL,
    PARENT,
    PHASES,
    UID,
    StoredRun,
    curve_points,
    list_runs,
    mlflow_safe_name,
    parent_run_points,
    routing_curve_points,
    stage_metrics_and_params,
)
from moecore.tracking.sync import (
    CURRENT,
    DENSE,
    FAMILY,
    SHARED,
    ModelHistories,
    group_by_method_and_seed,
    save_view,
)

COMPLETE = "moecore.imported"  # the run, and its parent, have all that its history holds
MODEL = "moecore.model"  # the folder of the model that was logged, or why it was left out
PIXELS = {"dpi": 110}
NOTE = "Headline numbers, as in the report. The stages, with all that they say, are child runs."


def sync_runs() -> str:
    """Import once; returns what was done, in words."""
    return describe_import(Importer().import_all())


def describe_import(counts: Counter[str]) -> str:
    """Return what an import did, in words."""
    done = ", ".join(f"{counts[word]} {word}" for word in ("runs added", "updated", "ended"))
    address = mlflow_connection.mask_password(mlflow_connection.store_address())
    return f"{address}: {done}; {counts['current']} are current"


class Importer:
    """Imports the main pipeline and every folder in which a question runs, again and again."""

    def __init__(self) -> None:
        self.readers: dict[Path, GrowingHistory] = {}
        self.sent: dict[str, int] = {}  # by a run's id: lines of its history that were sent

    def import_all(self) -> Counter[str]:
        """Import once; returns what was done. Raises UserError where anything hinders it."""
        counts: Counter[str] = Counter()
        with mlflow_connection.mlflow_import_lock():
            client = mlflow_connection.connect_store()
            with mlflow_connection.store_errors_as_user_errors():
                root = mlflow_connection.project_root()
                for study in (root, *sorted((root / RUNS).glob("*"))):
                    if histories := records.read_histories(study, self.readers):
                        counts += StudyImporter(client, study, histories, self.sent).import_all()
        return counts


class StudyImporter:
    """One import of the histories of a study into its experiment."""

    def __init__(
        self,
        client: Any,
        study: Path,
        histories: Mapping[str, ExecutionHistory],
        sent: dict[str, int],
    ) -> None:
        self.client = client
        self.study = study
        self.histories = histories
        self.sent = sent
        self.methods = records.study_methods(study)
        records.allow_study_packages(study)
        self.locked = records.paths_in_dvc_locks(study)
        self.experiment = mlflow_connection.get_experiment(
            client, mlflow_connection.experiment_name(study)
        )
        runs = list_runs(client, self.experiment.experiment_id)
        self.parents = {run.id: run for run in runs if run.tags[LEVEL] != "stage"}
        self.runs = {run.tags[UID]: run for run in runs if run.tags[LEVEL] == "stage"}
        self.items: dict[tuple[str, int], frozenset[str]] = {}  # by method and seed
        self.counts: Counter[str] = Counter()

    def import_all(self) -> Counter[str]:
        """Import what is new, family by family: after a kill, what was done is done."""
        shown = set()  # ids of the parents that are current
        dense = {}  # seed → changed runs of its dense model, complete once all others know
        for generation in group_by_method_and_seed(self.histories.values()):
            parent = self._find_parent(generation)
            if not self.methods or generation.method in (*self.methods, SHARED):
                shown.add(parent.id)
            runs = [self._import_history(one, generation, parent) for one in generation.histories]
            ended = [run for run in runs if run is not None]
            self.items[generation.method, generation.seed] = generation.measured_items()
            if generation.method != SHARED and (ended or generation.seed in dense):
                self._send_headline(generation, parent)
            states = [history.run_state() for history in generation.current_histories()]
            parent.set_state(*max(states, key=lambda state: (state[0] == "RUNNING", state[1])))
            if generation.method == DENSE and ended:
                dense[generation.seed] = ended
            else:
                mark_complete(ended)
        mark_complete([run for ended in dense.values() for run in ended])
        self._retire_runs(shown)
        save_view(self.client, self.experiment, [self.parents[one] for one in shown])
        return self.counts

    def _find_parent(self, generation: ModelHistories) -> StoredRun:
        from moecore.report.figures.drawing import INK, line_look

        parent = generation.choose_parent(self.parents.values())
        if parent is None:
            method, seed = generation.method, generation.seed
            name, tags = "data and teachers", {FAMILY: generation.family, LEVEL: SHARED}
            if method != SHARED:
                name = f"{method} seed {seed}"
                listed = method in self.methods
                colour = line_look(self.methods.index(method))["color"] if listed else INK
                tags |= {LEVEL: "method", "method": method, "seed": seed}
                tags |= {"mlflow.note.content": NOTE, "mlflow.runColor": colour}
            started = min(history.header["t"] for history in generation.histories)
            parent = self._create_run(name, started, tags)
            self.parents[parent.id] = parent
        parent.set_tags(generation.training_tags())
        return parent

    def _create_run(self, name: str, started: float, tags: Mapping[str, Any]) -> StoredRun:
        texts = {tag: str(value) for tag, value in tags.items() if value is not None}
        begun, experiment = int(started * 1000), self.experiment.experiment_id
        run = self.client.create_run(experiment, begun, tags=texts, run_name=name)
        return StoredRun(self.client, run)

    def _import_history(
        self, history: ExecutionHistory, generation: ModelHistories, newest: StoredRun
    ) -> StoredRun | None:
        """Send what is new in a history; returns its run where that has ended since the last."""
        header = history.header
        run = self.runs.get(header["uid"])
        parent: StoredRun | None = newest
        if generation.is_outdated(history):  # it stays with the model that it is of
            parent = self.parents.get(run.tags.get(PARENT, "")) if run else None
        path = history.folder.relative_to(self.study).as_posix()
        current = parent is newest and history.has_ended
        current = current and (self.locked is None or path in self.locked)
        tags = {CURRENT: str(current).lower(), PARENT: parent.id if parent else None}
        is_complete = run is not None and run.tags.get(COMPLETE) == "true"
        if run is not None and parent is not None and run.tags.get(PARENT) != parent.id:
            is_complete = False  # another parent has to be told
            self.sent.pop(run.id, None)
        if run is None:
            words = [header["stage"], header["phase"], header["method"]]
            words += [None if header["seed"] is None else f"seed {header['seed']}"]
            name = " ".join(word for word in words if word is not None)
            run = self._create_run(name, header["t"], header_tags(header) | tags)
            self.runs[header["uid"]] = run
            self._send_lines(history, run, parent)
            self.counts["runs added"] += 1
        elif not is_complete:
            self.counts["updated"] += self._send_lines(history, run, parent)
        run.set_tags(tags)
        models.set_alias(self.client, run, current)
        self.counts["current"] += current
        return run if history.has_ended and not is_complete else None

    def _send_lines(
        self, history: ExecutionHistory, run: StoredRun, parent: StoredRun | None
    ) -> bool:
        """Send the lines of a history that were not sent yet; returns whether anything changed."""
        new = history.lines[self.sent.get(run.id, 0) :]
        state, when = history.run_state()
        if not new and state == run.status:
            return False
        run.add_params(history.header["params"])
        run.add_points(curve_points(new) + routing_curve_points(new))
        if any("routing" in line for line in new):
            self._send_load_map(history, run)
        for line in new:
            self._send_line(history, line, run)
        phase = history.header["stage"]
        if parent is not None and phase in PHASES:
            parent.add_params(history.header["params"])
            parent.add_points(parent_run_points(new, phase))
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
            metrics, params = stage_metrics_and_params(history.header["stage"], line["summary"])
            run.set_numbers(metrics, int(line["t"] * 1000))
            run.add_params(params)
        if "dataset" in line:
            run.add_dataset(line["dataset"])
        if "status" in line:
            run.set_tags({"seconds": line["seconds"], "error": line.get("error")})
        if "file" in line:
            # A stage that ends moves its history: from the working folder to the published one.
            places = (history.folder, self.study / "artifacts/history" / history.item)
            files = [join_below_root(place, line["file"]) for place in places]
            for file in [file for file in files if file.is_file()][:1]:
                self.client.log_artifact(run.id, str(file), line["file"].split("/")[0])

    def _send_model(
        self, history: ExecutionHistory, run: StoredRun, parent: StoredRun | None
    ) -> None:
        for folder in [line["model"] for line in history.lines if "model" in line][-1:]:
            place, experiment = join_below_root(self.study, folder), self.experiment.experiment_id
            try:
                # Of a method's parent, whose row shows it under the name of the stage.
                stage = history.header["stage"]
                owner_id = parent.id if parent and stage in PHASES else run.id
                model_id = models.log_model(self.client, owner_id, stage, experiment, place)
            except UserError as error:  # DVC restored only the history, or it is an older model
                run.set_tags({MODEL: f"left out: {error}"})
                return
            for owner in (run, parent) if parent else (run,):
                owner.add_model(model_id)
            header = history.header
            words = (self.experiment.name, header["method"], header["stage"], header["seed"])
            name = ".".join(str(word) for word in words if word is not None)
            models.register_model(self.client, name, model_id, run)
            run.set_tags({MODEL: str(place)})

    def _send_figures(self, history: ExecutionHistory, run: StoredRun) -> None:
        from moecore.report.tables.headline_metrics import draw_run_figures

        said = []
        try:
            for name, figure in draw_run_figures(self.study, history.header["stage"], history.item):
                self.client.log_figure(run.id, figure, f"figures/{name}.png", save_kwargs=PIXELS)
                said.append(name)
        except UserError as error:  # the result is not there any more, or of other code
            said.append(f"left out: {error}")
        run.set_tags({"moecore.figures": ", ".join(said) or None})

    def _send_load_map(self, history: ExecutionHistory, run: StoredRun) -> None:
        from moecore.report.figures.expert_load import draw_load_over_steps

        points = [point for _, point in routing_points(history.lines)]
        figure = draw_load_over_steps(points)
        self.client.log_figure(run.id, figure, "figures/expert_load.png", save_kwargs=PIXELS)

    def _send_headline(self, generation: ModelHistories, parent: StoredRun) -> None:
        from moecore.report.tables.headline_metrics import read_headline_numbers

        method, seed = generation.method, generation.seed
        items = {name: self.items.get((name, seed), frozenset()) for name in (method, DENSE)}
        numbers, counts = read_headline_numbers(self.study, method, seed, items)
        named = {mlflow_safe_name(name): value for name, value in numbers.items()}
        parent.set_numbers(named, int(time.time() * 1000))
        parent.add_params(counts)

    def _retire_runs(self, shown: set[str]) -> None:
        """End runs that another took the place of, or whose process went without a history."""
        for run in self.parents.values():
            run.set_tags({CURRENT: str(run.id in shown).lower()})
            if run.id not in shown and run.status == "RUNNING":
                run.set_state("KILLED", time.time())
        for run in [run for uid, run in self.runs.items() if uid not in self.histories]:
            run.set_tags({CURRENT: "false"})
            writer = (run.tags["host"], int(run.tags["pid"]), run.started)
            if run.status == "RUNNING" and not records.is_process_running(*writer):
                run.set_state("KILLED", time.time())
                self.counts["ended"] += 1


def mark_complete(runs: list[StoredRun]) -> None:
    """Let the next import leave these runs alone."""
    for run in runs:
        run.set_tags({COMPLETE: "true"})


def header_tags(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tags that a history's first line gives to its run; None where it has none."""
    names = ("stage", "method", "seed", "phase", "params_hash", "host", "pid", "python")
    own = {UID: header["uid"], LEVEL: "stage", "dvc.stage": header["dvc_stage"]}
    versions = header.get("versions", {})  # older histories have none
    own |= {f"version.{name}": version for name, version in versions.items()}
    return {name: header[name] for name in names} | own | source_tags(header)


def source_tags(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what MLflow's column Source and its page of a run show: command and commit."""
    return {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": header["command"],
        "mlflow.source.git.commit": header["commit"],
        "mlflow.source.git.dirty": header["dirty"],
    }
