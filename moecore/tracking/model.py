"""Log trained models to MLflow, as a folder, the code that loads it and a signature, unpickled.

Names in the registry are study.method.phase.seed, as MLflow allows neither "/" nor ":". Every
training adds a version; the alias ``current`` names the version whose stage is up to date.
"""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecore.core.files import UserError
from moecore.core.outside_packages import allowed_packages, package_folder
from moecore.core.source_layout import ROOT
from moecore.tracking.mlflow_connection import (
    error_cause,
    mask_password,
    set_mlflow_timeouts_and_logging,
    store_address,
)
from moecore.tracking.stored_run import StoredRun

if TYPE_CHECKING:
    from moecore.nn.backbones.base_model import ImageSpec

PACKAGES = ("torch", "numpy", "pydantic", "safetensors")
ALIAS = "current"
VERSION = "moecore.registered"  # a tag of the run: name and version
POINTED = "moecore.alias"  # a tag of the run: whether the alias names its model
SCHEME = "models:/"


def log_model(client: Any, run_id: str, name: str, experiment_id: str, folder: Path) -> str:
    """Copy a model's folder into MLflow, once, with a signature; return MLflow's id."""
    import mlflow

    from moecore.training.artifacts import load_card

    query = f"source_run_id = '{run_id}' AND name = '{name}'"
    for model in client.search_logged_models([experiment_id], query):
        if model.status == "READY":
            return str(model.model_id)
        client.delete_logged_model(model.model_id)  # incomplete: its import was killed
    card = load_card(folder)
    outside = [name for name in allowed_packages() if name in card.versions]
    try:
        folders = [str(package_folder(name)) for name in outside]
    except ValueError as error:
        raise UserError(f"packages: {error}") from None
    mlflow.set_tracking_uri(store_address())
    model = mlflow.initialize_logged_model(name, run_id, experiment_id=experiment_id)
    # MLflow warns about missing examples and type hints; recording warnings silences them.
    with warnings.catch_warnings(record=True):
        mlflow.pyfunc.log_model(
            name=name,
            model_id=model.model_id,
            python_model=str(ROOT / "moecore" / "tracking" / "pyfunc.py"),
            artifacts={"model": str(folder.resolve())},
            code_paths=[str(ROOT / "moecore"), *folders],
            model_config={"packages": outside},
            signature=model_signature(card.image),
            pip_requirements=[f"{package}=={version(package)}" for package in PACKAGES],
        )
    return str(model.model_id)


def model_signature(image: "ImageSpec") -> Any:
    """Return MLflow's signature of a model: names, types and shapes of inputs and outputs."""
    import numpy
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    from moecore.tasks.image_text import ImageText

    task, int64, float32 = image.task, numpy.dtype("int64"), numpy.dtype("float32")
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
    answers = TensorSpec(float32, answer_shape, answer_name)
    return ModelSignature(Schema(inputs), Schema([answers]))


def register_model(client: Any, name: str, model_id: str, run: StoredRun) -> None:
    """Create the run's version of the registered model ``name``, once."""
    versions = client.search_model_versions(f"run_id = '{run.id}'")
    if not versions:
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        source = f"{SCHEME}{model_id}"
        versions = [client.create_model_version(name, source, run.id, model_id=model_id)]
    run.set_tags({VERSION: f"{versions[0].name} {versions[0].version}"})


def set_alias(client: Any, run: StoredRun, current: bool) -> None:
    """Let the alias ``current`` name the run's model, once, if its stage is up to date."""
    if VERSION not in run.tags:
        return
    if current and run.tags.get(POINTED) != "true":
        name, number = run.tags[VERSION].rsplit(maxsplit=1)
        client.set_registered_model_alias(name, ALIAS, number)
    run.set_tags({POINTED: str(current).lower()})


def model_folder(address: str) -> Path:
    """Return the folder of a registered model, for ``load_model``; nothing is unpickled.

    Args:
        address: ``models:/moecore.vmoe.pretrain.0@current``, or ``…/1`` for a version, in the store
            of ``moecore ui``.

    Raises:
        UserError: the store has no such model.
    """
    set_mlflow_timeouts_and_logging()
    import mlflow
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    mlflow.set_tracking_uri(store_address())
    try:
        folder = Path(download_artifacts(artifact_uri=address))
        logged = Model.load(folder).flavors["python_function"]["artifacts"]["model"]
    except (MlflowException, OSError, KeyError) as error:
        raise UserError(
            f"{address}: no such model in {mask_password(store_address())} ({error_cause(error)}); "
            "allowed: models:/study.method.phase.seed@current, as `moecore ui` lists them"
        ) from error
    return folder / logged["path"]
