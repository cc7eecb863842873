"""Data and trained models that several tests of measurements read and none changes."""

from pathlib import Path

import pytest

from moecore.data.prepared import Prepared
from moecore.parts import Config, MeasuredModel
from moecore.testing import check_measurement
from tests.data.making import write_cohort
from tests.measure.subjects import digits, top_k_mlps, train_on_ages, write_models


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Prepared:
    """Return 60 test images of digits, of 12 × 12 pixels."""
    return digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def results(request, data, models) -> dict[str, Config]:
    """Return model → checked result, of the settings and the models of a module."""
    settings = request.module.SETTINGS
    subjects = {name: MeasuredModel(model, data) for name, model in models.items()}
    return {name: check_measurement(settings, subject) for name, subject in subjects.items()}


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> tuple[Path, dict[str, MeasuredModel]]:
    """Return the folder of a run, and its trained models of digits, "vit" and "dense"."""
    folder = tmp_path_factory.mktemp("run")
    return folder, write_models(folder)


@pytest.fixture(scope="session")
def cohort(tmp_path_factory) -> Prepared:
    return write_cohort(tmp_path_factory.mktemp("cohort"), simulated=False)


@pytest.fixture(scope="session")
def aged(tmp_path_factory) -> dict[str, MeasuredModel]:
    """Return a dense and a sparse model that follow age a little."""
    data = write_cohort(tmp_path_factory.mktemp("ages"))
    models = {"dense": None, "moe": top_k_mlps()}
    return {name: MeasuredModel(train_on_ages(data, moe), data) for name, moe in models.items()}
