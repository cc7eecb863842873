"""A trained model as an MLflow model: its folder, the code that loads it, and a signature. Nothing is pickled."""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moecore.backbones.image import ImageSpec
from moecore.sources import ROOT
from moecore.tracking.store import uri

PACKAGES = ("torch", "numpy", "pydantic", "safetensors")


def log_model(run: str, experiment: str, folder: Path, card: dict[str, Any]) -> None:
    """Copy the model of ``folder`` into an MLflow run, with the shapes that the data's card gives."""
    import mlflow
    from mlflow.models import Model, ModelSignature

    mlflow.set_tracking_uri(uri())
    mlflow.set_experiment(experiment_id=experiment)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about examples and type hints: the signature is given below
        Model.log(
            artifact_path=None,
            name="model",
            flavor=mlflow.pyfunc,
            run_id=run,
            python_model=str(ROOT / "moecore" / "tracking" / "pyfunc.py"),
            artifacts={"model": str(folder.resolve())},
            code_paths=[str(ROOT / "moecore")],
            signature=ModelSignature(*_shapes(card)),
            pip_requirements=[f"{package}=={version(package)}" for package in PACKAGES],
        )


def _shapes(card: dict[str, Any]) -> tuple[Any, Any]:
    import numpy
    from mlflow.types import Schema, TensorSpec

    spec = ImageSpec.from_card(card)
    images = TensorSpec(numpy.dtype("float32"), (-1, spec.channels, *spec.shape), "images")
    answers = TensorSpec(numpy.dtype("float32"), (-1, spec.outputs), spec.target or "scores")
    return Schema([images]), Schema([answers])
