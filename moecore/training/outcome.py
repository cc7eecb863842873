"""Results of stages that train, prune or merge a model: scores, costs and routing."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch

from moecore.core.config import Config
from moecore.core.files import write_json_sha256
from moecore.data.prepared import Prepared, Split
from moecore.nn import encoded_routing, predict
from moecore.nn.backbones.base_model import Model, count_total_and_active_parameters
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.statistics import comparisons, intervals
from moecore.tasks.base import ExtraTestMetrics, Task
from moecore.training.meter import MEMORY, check_finite_predictions
from moecore.training.settings import Training

SCORE_FILE = "score.json"  # in a model's folder
Agreement = tuple[float | None, ...]  # one share per point in time; None where undefined
ClassMap = tuple[float | None, ...]  # mean probability per expert; None for a class without images


class TissueRoutingRow(Config):
    """A tissue's top experts and token shares in the last MoE layer (ERMoE-ba, supplement §3)."""

    region: str  # the tissue; random_<tissue> for equally many voxels at random places in the brain
    experts: tuple[tuple[str, float], ...]  # the two with the highest mean score, and that score
    share: dict[str, float]  # share of the tissue's tokens per expert


class EpochTissueRouting(Config):
    """The ``TissueRoutingRow`` of each tissue after one epoch."""

    epoch: int
    rows: tuple[TissueRoutingRow, ...]


class WatchedImagesRouting(Config):
    """The routing of a few test images after one epoch, for pages that show single images."""

    epoch: int
    images: tuple[int, ...]  # indices in the split
    trace: encoded_routing.EncodedPredictionsAndRouting


class RoutingOverTraining(Config):
    """Routing in training and fine-tuning; agreement: share of tokens with equal top-1 experts."""

    agreement_with_final: Agreement = ()  # after each epoch, on validation images
    agreement_consecutive: Agreement = ()  # between epochs
    saturation: Agreement = ()  # after each epoch: share of a token's final experts
    # after each epoch, if the truth is known; mean over layers, None where no token was routed
    purity: tuple[float | None, ...] = ()
    class_maps: dict[str, tuple[tuple[ClassMap, ...], ...]] = {}  # epoch → class, layer, expert
    region_routing: tuple[EpochTissueRouting, ...] = ()  # for data with tissue maps
    watched: tuple[WatchedImagesRouting, ...] = ()  # after some of the epochs
    routing_agreement_before_after: Agreement = ()  # of fine-tuning; per layer, test images
    # Agreement per item, mean over layers, encoded by ``encode_item_values``; keys are some of
    # with_final_quarter, with_final_half, consecutive_quarter, …_half, …_last, before_after,
    # saturation_half.
    agreement_items: dict[str, str] = {}


class Outcome(ExtraTestMetrics, RoutingOverTraining):
    """Scores, losses, costs and routing of a model. Pruned or merged models have no curve."""

    task: Task
    test_score: intervals.Estimate
    test_items: str | None = None  # one score per item, from ``encode_item_values``
    validation_score: intervals.Estimate
    test_loss: float  # for a real target in deviations of the training labels, as in training
    test_count: int  # images
    epochs: int
    images_per_second: float | None = None  # median of the logged points
    seconds: float
    training_step_ms: float | None = None  # 1000 · batch / images_per_second
    training_memory_mb: float | None = None  # peak of the run's second step, in 10⁶ bytes
    parameters: int
    active_parameters: int  # used by an image's tokens
    curve: tuple[dict[str, float | None], ...]  # the logged points
    routing_warnings: tuple[str, ...] = ()  # of the monitor

    def with_routing(self, routing: RoutingOverTraining) -> Self:
        return self.model_copy(update=dict(routing))


class FinalRouterLosses(Config):
    """Losses of the teacher's routers after the last step of their fit (TGR-MoE, §3.2)."""

    loss: float
    balance: float
    entropy: float


class ModelScore(Config):
    """The score of a model on the test split of its data, stored with its weights."""

    data: str  # name of the data set
    test_score: intervals.Estimate
    test_count: int  # items


def save_model_score(folder: Path, outcome: Outcome, data: Prepared) -> None:
    score = outcome.model_dump(mode="json", include={"test_score", "test_count"})
    write_json_sha256(folder / SCORE_FILE, {"data": data.card["name"], **score})


class LoggedPoints(NamedTuple):
    """The logged points of a training, including those before a resumption."""

    points: Sequence[tuple[int, dict[str, float]]]  # step, values
    seconds: float
    warnings: Sequence[str] = ()  # of the monitor


def build_outcome(model: Model, data: Prepared, settings: Training, log: LoggedPoints) -> Outcome:
    rate = float(np.median([values["images_per_second"] for _, values in log.points]))
    memory = [values[MEMORY] for _, values in log.points if MEMORY in values]
    training = {
        "epochs": settings.epochs,
        "images_per_second": rate,
        "training_step_ms": 1000 * settings.batch / rate,
        "training_memory_mb": max(memory, default=None),
        "curve": tuple({"step": at, "train_loss": row["task"], **row} for at, row in log.points),
        "routing_warnings": tuple(log.warnings),
    }
    return evaluate_to_outcome(model, data, log.seconds, settings.batch).model_copy(update=training)


def evaluate_to_outcome(model: Model, data: Prepared, seconds: float, streams: int = 1) -> Outcome:
    # seconds: spent on training. streams: number of text streams read in parallel, for ``ppl``.
    task = model.image.task
    if isinstance(model, LanguageTransformer):  # scores per block, perplexity over whole streams
        scores = predict.score_last_blocks(model, data.test.images, _label_tensor(data.test))
        held_out = data.validation
        validation = predict.score_last_blocks(model, held_out.images, _label_tensor(held_out))
        loss = float(scores.mean())
        text = torch.from_numpy(np.array(data.tokens_with_kinds("test")))
        perplexity = predict.text_perplexity(model, text, streams)
        every_token = predict.text_perplexity(model, text, 1, full_blocks=False)
        details = ExtraTestMetrics(ppl=perplexity, ppl_all=every_token)
    else:
        prediction, labels = _predict_split(model, data.test)
        check_finite_predictions(prediction, "test")
        scores = task.scores(prediction, labels)
        validation = task.scores(*_predict_split(model, data.validation))
        # The loss is reported in the unit of the training, a target's deviation.
        loss = float(task.test_loss(prediction, labels).mean()) / task.head[1]
        details = task.details(prediction, labels, _label_tensor(data.train))
    parameters = count_total_and_active_parameters(model)
    return Outcome(
        **details.model_dump(),
        parameters=parameters["parameters"],
        active_parameters=parameters["active_parameters"],
        task=task,
        test_score=intervals.Estimate.of(task.interval(scores, data.test.people)),
        test_items=comparisons.encode_item_values(scores.double().numpy(), data.test.people),
        validation_score=intervals.Estimate.of(task.interval(validation, data.validation.people)),
        test_loss=loss,
        test_count=len(scores),
        epochs=0,
        seconds=seconds,
        curve=(),
    )


def _predict_split(model: Model, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    prediction, _ = predict.predict_in_batches(model, split.images, batch=500, routing=False)
    return prediction, model.targets(_label_tensor(split))


def _label_tensor(split: Split) -> torch.Tensor:
    return torch.from_numpy(np.array(split.labels))
