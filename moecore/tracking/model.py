"""A trained model as an MLflow model: its folder, the code that loads it, and a signature.

Nothing is pickled.
"""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from moecore.core.sources import ROOT
from moecore.tracking.store import uri

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

    single = numpy.dtype("float32")
    name = image.task.answers[0] if image.task.outputs == 1 else "scores"
    images = TensorSpec(single, (-1, image.channels, *image.shape), "images")
    answers = TensorSpec(single, (-1, image.task.outputs), name)
    return ModelSignature(Schema([images]), Schema([answers]))
