"""Sends values and trained models to runs of MLflow's store, and names the values there.

In MLflow's charts, the part of a name before the last slash is a section: ``loss/``, ``train/``,
``validation/``, ``test/`` and ``routing/`` of trainings, then one section per measurement; in
parent runs one per quantity. Counts (images, parameters) are params, as a chart would not help.

A model is logged as a folder, the code that loads it and a signature, unpickled. Names in the
registry are study.method.phase.seed, as MLflow allows neither "/" nor ":". Every training adds a
version; the alias ``current`` names the version whose stage is up to date.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from moecore.core import config, source_layout
from moecore.core.files import UserError, to_jsonable
from moecore.run.history_file import flatten_keys, logged_points, routing_points
from moecore.study.stages import MODEL_STAGES
from moecore.tracking import mlflow_connection

if TYPE_CHECKING:
    from moecore.nn.backbones.base_model import ImageSpec

PROGRESS_NAMES = ("epoch", "learning_rate", "images_per_second", "memory_mb")  # not scores
SECTION_BY_STAGE = {"calibrate": "calibration", "teacher_router": "loss"}  # if not its name
Point = tuple[str, float, int, int]  # name, value, milliseconds, step
UID_TAG = "moecore.uid"
PARENT_TAG = "mlflow.parentRunId"
LEVEL_TAG = "level"  # "method": a parent; "shared": the parent of shared stages; "stage": a child
MAX_TAG_LENGTH = 5000  # letters
MAX_PARAM_LENGTH = 500
MODEL_PACKAGES = ("torch", "numpy", "pydantic", "safetensors")
CURRENT_ALIAS = "current"
REGISTERED_VERSION_TAG = "moecore.registered"  # a tag of the run: name and version
HAS_ALIAS_TAG = "moecore.alias"  # a tag of the run: whether the alias names its model
SCHEME = "models:/"


def mlflow_safe_name(name: str) -> str:
    """Return ``name`` with ``_`` for each character that MLflow refuses, such as ``@``."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def training_curve_points(lines: list[dict]) -> list[Point]:
    """Convert a training's history lines to points named ``train/…``, ``loss/…`` etc."""
    points = []
    for step, t, values in logged_points(lines):
        for name, value in values.items():
            group, _, quantity = name.partition("_")
            if group not in ("train", "validation"):
                group = "train" if name in PROGRESS_NAMES else "loss"
                quantity = "total" if name == "loss" else name
            points.append((mlflow_safe_name(f"{group}/{quantity}"), value, int(t * 1000), step))
    return points


def routing_curve_points(lines: list[dict]) -> list[Point]:
    return [
        (f"routing/{name}", float(value), int(t * 1000), point.step)
        for t, point in routing_points(lines)
        for name, value in point.curve_values().items()
        if value is not None
    ]


def parent_run_curve_points(lines: list[dict], phase: str) -> list[Point]:
    """Return the parent run's points, by phase: of losses total and task; no ``PROGRESS_NAMES``."""
    pace = [f"train/{name}" for name in PROGRESS_NAMES]
    return [
        (name.replace("/", f"/{phase} ", 1), value, at, step)
        for name, value, at, step in training_curve_points(lines)
        if name in ("loss/total", "loss/task")
        or (not name.startswith("loss/") and name not in pace)
    ]


def split_metrics_and_params(
    stage: str, summary: Mapping[str, Any]
) -> tuple[dict[str, float], dict]:
    """Split a result's numbers: floats are MLflow's metrics, integers are params."""
    metrics: dict[str, float] = {}
    params: dict[str, Any] = {}
    for name, value in summary.items():
        group = SECTION_BY_STAGE.get(stage, stage)
        title = re.sub(r"\.(value|median)$", "", name)
        if stage in MODEL_STAGES:
            split, _, rest = title.partition("_")
            tested = split in ("test", "validation")
            group, title = (split, rest) if tested else ("train", f"{title} overall")
        if isinstance(value, int) and name != "test_correct":
            params[f"{stage}.{name}"] = value
        elif value is not None and not name.endswith((".low", ".high")):
            metrics[mlflow_safe_name(f"{group}/{title}")] = float(value)
    return metrics, params


def select_changed_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that differ from their defaults, by dotted key."""
    # params: dotted key → value. Sections of another version or package are returned whole.
    from moecore.data.sources.base import Source
    from moecore.study.study import Study
    from moecore.training.method import Method

    sections: dict[str, Any] = {"method": Method, "data": Source}
    sections = {name: field.annotation for name, field in Study.model_fields.items()} | sections
    changed = nest_keys(params)
    for section in sections.keys() & changed.keys():
        with suppress(ValidationError):  # of another version
            settings = TypeAdapter(sections[section]).validate_python(changed[section])
            changed[section] = leave_out_defaults(settings)
    return flatten_keys(changed)


def nest_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings and lists from dotted keys: the inverse of ``flatten_keys``."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        inner = nested
        *outer, last = key.split(".")
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
    text = json.dumps(nested)
    return json.loads(text, object_hook=lambda part: [*part.values()] if "0" in part else part)


def leave_out_defaults(value: Any) -> Any:
    if isinstance(value, tuple):
        return [leave_out_defaults(item) for item in value]
    if not isinstance(value, BaseModel):
        return to_jsonable(value)
    changed = {}
    for name, field in type(value).model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data=vars(value))
        if name == config.KIND or getattr(value, name) != default:
            changed[name] = leave_out_defaults(getattr(value, name))
    return changed


class StoredRun:
    """A run in MLflow's store; it sends only values that the store does not have."""

    def __init__(self, client: Any, run: Any) -> None:
        self.client = client
        self.id: str = run.info.run_id
        self.status: str = run.info.status
        self.started: float = run.info.start_time / 1000  # seconds since 1970
        self.ended: float = (run.info.end_time or 0) / 1000
        self.tags: dict[str, str] = dict(run.data.tags)
        self.params = set(run.data.params)
        self.metrics: dict[str, float] = dict(run.data.metrics)  # the latest values
        self.models: set[str] = set()
        if run.outputs:
            self.models = {model.model_id for model in run.outputs.model_outputs}

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set the tags whose values differ from the store's; a value None is ignored."""
        from mlflow.entities import RunTag

        texts = {
            mlflow_safe_name(name): str(value)[:MAX_TAG_LENGTH]
            for name, value in tags.items()
            if value is not None
        }
        new = {name: text for name, text in texts.items() if self.tags.get(name) != text}
        if new:
            self.client.log_batch(self.id, tags=[RunTag(*tag) for tag in new.items()])
            self.tags |= new

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Send the params that the run does not have; MLflow never changes a param."""
        from mlflow.entities import Param

        new = {}
        for name, value in params.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if (name := mlflow_safe_name(name)) not in self.params:
                fits = len(text) <= MAX_PARAM_LENGTH
                new[name] = text if fits else text[: MAX_PARAM_LENGTH - 1] + "…"
        for part in split_into_batches(list(new.items()), 100):
            self.client.log_batch(self.id, params=[Param(*param) for param in part])
        self.params |= set(new)

    def add_points(self, points: list[Point]) -> None:
        """Send the points whose name and step the run does not have."""
        stored = {
            (name, point.step)
            for name in {name for name, *_ in points} & self.metrics.keys()
            for point in self.client.get_metric_history(self.id, name)
        }
        self._send([point for point in points if (point[0], point[3]) not in stored])

    def set_numbers(self, numbers: Mapping[str, float], milliseconds: int) -> None:
        """Set metrics at step 0; milliseconds: their time since 1970."""
        new = [(name, value) for name, value in numbers.items() if self.metrics.get(name) != value]
        self._send([(name, value, milliseconds, 0) for name, value in new])

    def _send(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        for part in split_into_batches(points, 1000):
            self.client.log_batch(self.id, metrics=[Metric(*point) for point in part])
        self.metrics |= {name: value for name, value, *_ in points}

    def add_dataset(self, card: Mapping[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        files = json.dumps(card.get("files", {}), sort_keys=True)
        name = str(card.get("name", "data"))[:500]
        digest = hashlib.sha256(files.encode()).hexdigest()[:8]
        source, counts = (json.dumps({key: card.get(key)}) for key in ("source", "counts"))
        data = Dataset(name, digest, "card", source, profile=counts)
        used = DatasetInput(data, [InputTag("mlflow.data.context", "training")])
        self.client.log_inputs(self.id, [used])

    def add_model(self, model_id: str) -> None:
        from mlflow.entities import LoggedModelOutput

        if model_id not in self.models:
            self.client.log_outputs(self.id, [LoggedModelOutput(model_id, step=0)])
            self.models.add(model_id)

    def set_state(self, status: str, when: float) -> None:
        """Set the run's status; when: its end, in seconds since 1970."""
        if status != "RUNNING" and (status != self.status or abs(self.ended - when) > 0.002):
            self.client.set_terminated(self.id, status, int(when * 1000))
            self.ended = when
        elif status != self.status:
            self.client.update_run(self.id, status=status)
        self.status = status


def split_into_batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def log_model(client: Any, run_id: str, name: str, experiment_id: str, folder: Path) -> str:
    """Copy a model's folder into MLflow, if it is not there; return the model's id."""
    import mlflow

    from moecore.training.artifacts import load_model_card

    query = f"source_run_id = '{run_id}' AND name = '{name}'"
    for model in client.search_logged_models([experiment_id], query):
        if model.status == "READY":
            return str(model.model_id)
        client.delete_logged_model(model.model_id)  # incomplete: its import was killed
    card = load_model_card(folder)
    outside = [name for name in source_layout.allowed_packages() if name in card.versions]
    try:
        folders = [str(source_layout.package_folder(name)) for name in outside]
    except ValueError as error:
        raise UserError(f"packages: {error}") from None
    mlflow.set_tracking_uri(mlflow_connection.store_address())
    model = mlflow.initialize_logged_model(name, run_id, experiment_id=experiment_id)
    # MLflow warns about missing examples and type hints; recording warnings silences them.
    with warnings.catch_warnings(record=True):
        mlflow.pyfunc.log_model(
            name=name,
            model_id=model.model_id,
            python_model=str(source_layout.ROOT / "moecore" / "tracking" / "pyfunc.py"),
            artifacts={"model": str(folder.resolve())},
            code_paths=[str(source_layout.ROOT / "moecore"), *folders],
            model_config={"packages": outside},
            signature=model_signature(card.image),
            pip_requirements=[f"{package}=={version(package)}" for package in MODEL_PACKAGES],
        )
    return str(model.model_id)


def model_signature(image: "ImageSpec") -> Any:
    import numpy
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    from moecore.tasks.image_text import ImageText

    task = image.task
    int64 = numpy.dtype("int64")
    float32 = numpy.dtype("float32")
    images = TensorSpec(float32, (-1, image.stored_channels, *image.shape), "images")
    inputs: list[TensorSpec | ColSpec] = [images]
    answer_shape = (-1, task.cells * task.outputs)
    answer_name = "scores"
    if task.long:
        inputs = [TensorSpec(int64, (-1, image.stored_channels, *image.shape), "words")]
        answer_shape = (-1, *image.shape, task.outputs)
    elif isinstance(task, ImageText):
        inputs = [images, TensorSpec(int64, (-1, task.context), "captions")]
        answer_shape = (-1, -1)
    elif task.outputs == 1:
        answer_name = task.answers[0]
    return ModelSignature(Schema(inputs), Schema([TensorSpec(float32, answer_shape, answer_name)]))


def register_model(client: Any, name: str, model_id: str, run: StoredRun) -> None:
    versions = client.search_model_versions(f"run_id = '{run.id}'")
    if not versions:
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        source = f"{SCHEME}{model_id}"
        versions = [client.create_model_version(name, source, run.id, model_id=model_id)]
    run.set_tags({REGISTERED_VERSION_TAG: f"{versions[0].name} {versions[0].version}"})


def point_current_alias(client: Any, run: StoredRun, current: bool) -> None:
    """Let the alias ``current`` name the run's model, if the run is up to date."""
    if REGISTERED_VERSION_TAG not in run.tags:
        return
    if current and run.tags.get(HAS_ALIAS_TAG) != "true":
        name, number = run.tags[REGISTERED_VERSION_TAG].rsplit(maxsplit=1)
        client.set_registered_model_alias(name, CURRENT_ALIAS, number)
    run.set_tags({HAS_ALIAS_TAG: str(current).lower()})


def model_folder(address: str) -> Path:
    """Return the folder of a registered model, for ``load_model``; nothing is unpickled.

    Args:
        address: ``models:/moecore.vmoe.pretrain.0@current``, or ``…/1`` for a version, in the store
            of ``moecore ui``.

    Raises:
        UserError: the store has no such model.
    """
    mlflow_connection.set_mlflow_timeouts_and_logging()
    import mlflow
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    mlflow.set_tracking_uri(mlflow_connection.store_address())
    try:
        folder = Path(download_artifacts(artifact_uri=address))
        logged = Model.load(folder).flavors["python_function"]["artifacts"]["model"]
    except (MlflowException, OSError, KeyError) as error:
        store = mlflow_connection.mask_password(mlflow_connection.store_address())
        raise UserError(
            f"{address}: no such model in {store} ({mlflow_connection.shorten_error(error)}); "
            "allowed: models:/study.method.phase.seed@current, as `moecore ui` lists them"
        ) from error
    return folder / logged["path"]
