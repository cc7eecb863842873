"""Trained models in MLflow's registry: ``moecore.vmoe.pretrain.0`` is study.method.phase.seed.

MLflow allows neither "/" nor ":" in the name of a registered model. Every training adds a version;
the alias ``current`` names the one whose stage is up to date.
"""

from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.tracking.known import Known
from moecore.tracking.store import first_line, uri

ALIAS = "current"
VERSION = "moecore.registered"  # a tag of the run: name and version
POINTED = "moecore.alias"  # a tag: whether the alias names it
SCHEME = "models:/"


def registered_name(study: str, header: dict) -> str:
    """``study.method.phase.seed``; of a teacher ``study.teacher``."""
    words = (study, header["method"], header["stage"], header["seed"])
    return ".".join(str(word) for word in words if word is not None)


def register(client: Any, name: str, model_id: str, run: Known) -> dict[str, str]:
    """A new version of the registered model ``name``; returns the tag that the run gets."""
    from mlflow.exceptions import MlflowException

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
        name, version = run.tags[VERSION].split()
        client.set_registered_model_alias(name, ALIAS, version)
    run.tag(client, {POINTED: str(current).lower()})


def model_folder(address: str) -> Path:
    """The folder of a registered model, for ``load_model``.

    address: ``models:/moecore.vmoe.pretrain.0@current``, or ``…/1`` for a version, in the store of
    ``moecore ui``. Nothing is unpickled. Raises UserError where there is no such model.
    """
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
