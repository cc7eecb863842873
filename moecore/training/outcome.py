"""What a training came to: the result of the stages that train, and of prune and merge."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from moecore.core.config import Config
from moecore.data.prepared import Prepared, Split
from moecore.nn.backbones.base_model import Model, parameter_counts
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.nn.predict import predict_in_batches, text_block_scores, text_perplexity
from moecore.nn.routing_traces import ImageTraces
from moecore.statistics.crossed import encode_item_values
from moecore.statistics.intervals import Estimate
from moecore.tasks.base import ExtraTestMetrics, Task
from moecore.training.meter import MEMORY, check_finite_predictions
from moecore.training.settings import Training

Agreement = tuple[float | None, ...]  # one share a point in time; None where it is not defined
Map = tuple[float | None, ...]  # mean probability of each expert; None for a class without images


class TissueRoutingRow(Config):
    """Which experts of the last MoE layer see one tissue (ERMoE-ba, supplement §3)."""

    region: str  # the tissue; random_<tissue> for as many voxels at random places of the brain
    experts: tuple[tuple[str, float], ...]  # the two of the highest mean score, with that score
    share: dict[str, float]  # of the tokens, for each expert


class EpochTissueRouting(Config):
    """The rows of all tissues after one epoch."""

    epoch: int
    rows: tuple[TissueRoutingRow, ...]


class WatchedEpoch(Config):
    """A few test images after one epoch, for pages that show single images."""

    epoch: int
    images: tuple[int, ...]  # their places in the split
    trace: ImageTraces


class Settling(Config):
    """How the routing settles while a model is trained; all empty for a dense model.

    Agreements are shares of tokens with the same most probable expert, on validation images.
    """

    agreement_with_final: Agreement = ()  # after each epoch
    agreement_consecutive: Agreement = ()  # between epochs
    saturation: Agreement = ()  # after each epoch: share of the experts of a token at the end
    # after each epoch, where the truth is known; mean over layers, None where nothing was routed
    purity: tuple[float | None, ...] = ()
    class_maps: dict[str, tuple[tuple[Map, ...], ...]] = {}  # epoch → class, layer, expert
    region_routing: tuple[EpochTissueRouting, ...] = ()  # of data with tissue maps
    watched: tuple[WatchedEpoch, ...] = ()  # after some of the epochs
    routing_agreement_before_after: Agreement = ()  # fine-tuning, for each layer, on test images
    # Of some of these values one number per item, mean over layers, by ``encode_item_values``:
    # with_final_quarter, with_final_half, consecutive_quarter, …_half, …_last, before_after,
    # saturation_half.
    agreement_items: dict[str, str] = {}


class Outcome(ExtraTestMetrics, Settling):
    """A trained model on the data that it was trained on; the test split is looked at once.

    One that was pruned or merged has 0 epochs, no curve, and the seconds that it took.
    """

    task: Task
    test_score: Estimate
    test_items: str | None = None  # one score an item, as ``encode_item_values`` packs them
    validation_score: Estimate
    test_loss: float  # of a real target in deviations of the training labels, as in training
    test_count: int  # images
    epochs: int
    images_per_second: float | None = None  # median of the logged points
    seconds: float
    training_step_ms: float | None = None  # batch / that rate: views, losses and update
    training_memory_mb: float | None = None  # 10⁶ bytes that the run's second step held at most
    parameters: int
    active_parameters: int  # that an image's tokens use
    curve: tuple[dict[str, float | None], ...]  # the logged points
    routing_warnings: tuple[str, ...] = ()  # what its monitor said; all else is as without one

    def with_routing(self, settling: Settling) -> Self:
        """Return the outcome with how the routing settled."""
        return self.model_copy(update=dict(settling))


class FinalRouterLosses(Config):
    """The losses of the teacher's routers after the last step of their fit (TGR-MoE, §3.2)."""

    loss: float
    balance: float
    entropy: float


class TrainingLog(NamedTuple):
    """What was logged of a training, over all its resumptions."""

    points: Sequence[tuple[int, dict[str, float]]]  # step, values
    seconds: float
    warnings: Sequence[str] = ()  # of the monitor


def evaluate_trained_model(
    model: Model, data: Prepared, settings: Training, log: TrainingLog
) -> Outcome:
    """Return what is reported of a trained model; UserError for predictions that are NaN."""
    rate = float(np.median([values["images_per_second"] for _, values in log.points]))
    memory = [values[MEMORY] for _, values in log.points if MEMORY in values]
    learned = {
        "epochs": settings.epochs,
        "images_per_second": rate,
        "training_step_ms": 1000 * settings.batch / rate,
        "training_memory_mb": max(memory, default=None),
        "curve": tuple(
            {"step": step, "train_loss": values["task"], **values} for step, values in log.points
        ),
        "routing_warnings": tuple(log.warnings),
    }
    return evaluate_model_outcome(model, data, log.seconds, settings.batch).model_copy(
        update=learned
    )


def evaluate_model_outcome(
    model: Model, data: Prepared, seconds: float, streams: int = 1
) -> Outcome:
    """Return what is reported of a model that ``seconds`` made; UserError for predictions that are
    NaN. streams: in which a text is read.
    """
    task = model.image.task
    test = (
        evaluate_held_out_text(model, data, streams)
        if task.long
        else evaluate_held_out_images(model, data)
    )
    score = test.scores
    parameters = parameter_counts(model)
    return Outcome(
        **test.details.model_dump(),
        parameters=parameters["parameters"],
        active_parameters=parameters["active_parameters"],
        task=task,
        test_score=Estimate.of(task.interval(score, data.test.people)),
        test_items=encode_item_values(score.double().numpy(), data.test.people),
        validation_score=Estimate.of(task.interval(test.validation, data.validation.people)),
        test_loss=test.loss,
        test_count=len(score),
        epochs=0,
        seconds=seconds,
        curve=(),
    )


class HeldOutScores(NamedTuple):
    """A model's scores (N,) on the test and validation split, and the test split's mean loss."""

    scores: torch.Tensor
    validation: torch.Tensor
    loss: float
    details: ExtraTestMetrics


def evaluate_held_out_images(model: Model, data: Prepared) -> HeldOutScores:
    """Evaluate predictions that fit into memory."""
    task = model.image.task
    prediction, labels = _predict_split(model, data.test)
    check_finite_predictions(prediction, "test")
    # A loss is reported in the unit of the training, which a target's deviation sets.
    _, deviation = task.head
    return HeldOutScores(
        task.scores(prediction, labels),
        task.scores(*_predict_split(model, data.validation)),
        float(task.test_loss(prediction, labels).mean()) / deviation,
        task.details(prediction, labels, _label_tensor(data.train)),
    )


def evaluate_held_out_text(model: Model, data: Prepared, streams: int) -> HeldOutScores:
    """Evaluate text: blocks are scored one by one, and perplexity is that of whole streams."""
    scores = text_block_scores(model, data.test.images, _label_tensor(data.test))
    validation = text_block_scores(model, data.validation.images, _label_tensor(data.validation))
    text = torch.from_numpy(np.array(data.text_rows("test")))
    assert isinstance(model, LanguageTransformer)
    printed = text_perplexity(model, text, streams)
    every = text_perplexity(model, text, 1, whole=False)
    return HeldOutScores(
        scores, validation, float(scores.mean()), ExtraTestMetrics(ppl=printed, ppl_all=every)
    )


def _predict_split(model: Model, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    prediction, _ = predict_in_batches(model, split.images, batch=500, routing=False)
    return prediction, model.targets(_label_tensor(split))


def _label_tensor(split: Split) -> torch.Tensor:
    return torch.from_numpy(np.array(split.labels))
