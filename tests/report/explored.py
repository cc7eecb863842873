"""Studies for the explorer's page, of real measurements of small models; the page in a browser."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moecore.measure import ExpertRoles, ExpertWorth, RouterRegret
from moecore.measure.base import MeasuredModel
from moecore.measure.explorer import Explorer, ExplorerData
from moecore.measure.routing_metrics.epoch_routing import explorer_image_indices
from moecore.measure.training import Trained, collect_outcome_values
from moecore.nn.encoded_routing import encode_predictions_and_records
from moecore.nn.predict import predict_in_batches
from moecore.report.page.explorer_page import render_study_explorer
from moecore.report.result_types import ModelResults, PhaseResults, StudyResults
from moecore.training.outcome import WatchedImagesRouting
from tests.measure.subjects import FEW, compute_without_cache, expert_roles, images, moe, subject
from tests.report.generated import trained

DENSE = "a dense model has no experts, so there is nothing to see"
PICKED = "#phase=pretrain&method=vmoe&beside=prc&layer=2&image=3&patch=4&kind=attack&step=2"


def study() -> StudyResults:
    """A dense model and two with experts, in two phases; the second was watched in training."""
    data = images()
    one = subject(data, moe())
    other = subject(data, moe(), seed=1)
    before = watched(subject(data, moe(), seed=2), 1), watched(other, 2)
    models = {"dense": skipped(), "vmoe": measured(one), "prc": measured(other, watched=before)}
    phases = {name: phase(data, models, name) for name in ("pretrain", "finetune")}
    return StudyResults(phases)


def alone(model: MeasuredModel, settings: Explorer = FEW) -> StudyResults:
    return StudyResults({"pretrain": phase(model.data, {"vmoe": measured(model, settings)})})


def phase(data, models: Mapping[str, ModelResults], name: str = "pretrain") -> PhaseResults:
    by_seed = {method: {0: results} for method, results in models.items()}
    return PhaseResults(name, data.card, data.task, by_seed)


def measured(model: MeasuredModel, settings: Explorer = FEW, watched: tuple = ()) -> ModelResults:
    result = settings.collect_result(model, compute_without_cache)
    outcome = trained(0, 0, True, "pretrain").model_copy(update={"watched": watched})
    return ModelResults({Explorer: result, Trained: collect_outcome_values(outcome)})


def first_explored(results: StudyResults) -> ExplorerData:
    return ExplorerData.model_validate(results.phases["pretrain"].first(Explorer)["vmoe"].facts)


def skipped() -> ModelResults:
    outcome = trained(0, 0, False, "pretrain")
    return ModelResults({Trained: collect_outcome_values(outcome)}, (f"single images: {DENSE}",))


def watched(model: MeasuredModel, epoch: int) -> WatchedImagesRouting:
    places = explorer_image_indices(model.data, 32)
    pixels = np.array(model.data.test.images[places])
    prediction, records = predict_in_batches(model.model, pixels, 32)
    trace = encode_predictions_and_records(prediction, records, model.data.task)
    return WatchedImagesRouting(epoch=epoch, images=places, trace=trace)


def analysed(model: MeasuredModel) -> ModelResults:
    """A model of which the page can say all that it knows of experts."""
    settings = ExpertWorth(draws=1), RouterRegret(images=4, tokens=1)
    results = {type(one): one.collect_result(model, compute_without_cache) for one in settings}
    roles = expert_roles(model, windows=(2,))
    known = measured(model)
    return known._replace(results={**known.results, **results, ExpertRoles: roles})


def two_seeds() -> StudyResults:
    """Two seeds of a method, and another method of which only single images were measured."""
    data = images()
    seeds = {seed: analysed(subject(data, moe(), seed=seed)) for seed in (0, 1)}
    other = {0: measured(subject(data, moe(), seed=2))}
    models = {"vmoe": seeds, "prc": other}
    return StudyResults({"pretrain": PhaseResults("pretrain", data.card, data.task, models)})


def written(path: Path, found) -> Path:
    path.write_text(render_study_explorer(found), encoding="utf-8")
    return path


def address(path: Path, state: str = "") -> str:
    return path.resolve().as_uri() + state


def settled(page):
    page.wait_for_selector("main[data-drawn]")
    page.wait_for_function("find('main').dataset.drawn === String(turn)")
    return page


def numbers(page, panel: int = 0) -> list[str]:
    """What stands in the patches, row by row."""
    settled(page)
    return page.locator(f".panel >> nth={panel}").locator(".cell").all_text_contents()


def state(page) -> dict[str, str]:
    settled(page)
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
