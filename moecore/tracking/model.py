"""A trained model as an MLflow model: its folder, the code that loads it, and a signature.

Nothing is pickled. In the registry ``moecore.vmoe.pretrain.0`` is study.method.phase.seed: MLflow
allows neither "/" nor ":" in such a name. Every training adds a version; the alias ``current``
names the one whose stage is up to date.
"""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.tracking.answers import first_line
from moecore.tracking.known import Known
from moecore.tracking.store import settle, uri

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

    from moecore.nn.backbones.image import ImageSpec

PACKAGES = ("torch", "numpy", "pydantic", "safetensors")


def log_model(run: str, experiment: str, folder: Path) -> str:
    """Copy the model of ``folder`` into an MLflow run, with the shapes that it takes and gives.

    Returns MLflow's id of it.

    Raises UserError where it is not the folder of a model of this version.
    """
    import mlflow
    from mlflow.models import Model

    # Here, as it brings torch, which an import without new models does not need.
    from moecore.training.artifacts import load_card

    image = load_card(folder).image
    mlflow.set_tracking_uri(uri())
    mlflow.set_experiment(experiment_id=experiment)
    # MLflow warns of missing examples and type hints, once a model: the signature is given below.
    # Recording is what silences it, as it resets the filters.
    with warnings.catch_warnings(record=True):
        logged = Model.log(
            artifact_path=None,
            name="model",
            flavor=mlflow.pyfunc,
            run_id=run,
            python_model=str(ROOT / "moecore" / "tracking" / "pyfunc.py"),
            artifacts={"model": str(folder.resolve())},
            code_paths=[str(ROOT / "moecore")],
            signature=_signature(image),
            pip_requirements=[f"{package}=={version(package)}" for package in PACKAGES],
        )
    return str(logged.model_id)


def _signature(image: "ImageSpec") -> "ModelSignature":
    import numpy
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    from moecore.tasks.image_text import ImageText

    single = numpy.dtype("float32")
    if image.task.long:
        words = TensorSpec(numpy.dtype("int64"), (-1, image.channels, *image.shape), "words")
        scores = TensorSpec(single, (-1, *image.shape, image.task.outputs), "scores")
        return ModelSignature(Schema([words]), Schema([scores]))
    images = TensorSpec(single, (-1, image.channels, *image.shape), "images")
    if isinstance(image.task, ImageText):
        captions = TensorSpec(numpy.dtype("int64"), (-1, image.task.context), "captions")
        scores = TensorSpec(single, (-1, -1), "scores")
        return ModelSignature(Schema([images, captions]), Schema([scores]))
    name = image.task.answers[0] if image.task.outputs == 1 else "scores"
    answers = TensorSpec(single, (-1, image.task.outputs), name)
    return ModelSignature(Schema([images]), Schema([answers]))


ALIAS = "current"
VERSION = "moecore.registered"  # a tag of the run: name and version
POINTED = "moecore.alias"  # a tag: whether the alias names it
SCHEME = "models:/"


def registered_name(study: str, header: dict) -> str:
    """``study.method.phase.seed``; of a teacher ``study.teacher.seed``."""
    words = (study, header["method"], header["stage"], header["seed"])
    return ".".join(str(word) for word in words if word is not None)


def logged_before(client: Any, experiment: str, run: str) -> str | None:
    """MLflow's id of the model that an import logged of ``run`` before it was killed.

    What was copied in part is removed: it is logged again.
    """
    words = f"source_run_id = '{run}'"
    for model in client.search_logged_models([experiment], filter_string=words):
        if model.status == "READY":
            return str(model.model_id)
        client.delete_logged_model(model.model_id)
    return None


def register(client: Any, name: str, model_id: str, run: Known) -> dict[str, str]:
    """The run's version of the registered model ``name``; returns the tag that the run gets."""
    from mlflow.exceptions import MlflowException

    for made in client.search_model_versions(f"run_id = '{run.id}'"):
        return {VERSION: f"{made.name} {made.version}"}
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = client.create_model_version(name, f"{SCHEME}{model_id}", run.id, model_id=model_id)
    return {VERSION: f"{name} {made.version}"}


def point_to(client: Any, run: Known, current: bool) -> None:
    """Let ``current`` name the run's model where its stage is up to date; once."""
    if VERSION not in run.tags:
        return
    if current and run.tags.get(POINTED) != "true":
        name, version = run.tags[VERSION].rsplit(maxsplit=1)
        client.set_registered_model_alias(name, ALIAS, version)
    run.tag(client, {POINTED: str(current).lower()})


def model_folder(address: str) -> Path:
    """The folder of a registered model, for ``load_model``.

    address: ``models:/moecore.vmoe.pretrain.0@current``, or ``…/1`` for a version, in the store of
    ``moecore ui``. Nothing is unpickled. Raises UserError where there is no such model.
    """
    settle()
    import mlflow
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    mlflow.set_tracking_uri(uri())
    try:
        folder = Path(download_artifacts(artifact_uri=address))
        logged = Model.load(folder)
    except (MlflowException, OSError) as error:
        raise UserError(
            f"{address}: no such model in {uri()} ({first_line(error)}); allowed: "
            "models:/study.method.phase.seed@current, as in the page `Model registry` of "
            "`moecore ui`"
        ) from error
    artifacts = logged.flavors.get("python_function", {}).get("artifacts", {})
    if "model" not in artifacts:
        raise UserError(f"{address}: not a model of this software; allowed: those of its trainings")
    return folder / artifacts["model"]["path"]
