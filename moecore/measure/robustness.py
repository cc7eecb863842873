"""Score and routing of a subset of the test split under attack, and an audit of the attacks."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from moecore.attacks.attack_target import Precision, Target, draw_image_indices
from moecore.attacks.base import Attack
from moecore.attacks.surrogate import RouterAttacks
from moecore.core.config import Misfits, Surroundings
from moecore.core.files import UserError, format_found_and_allowed
from moecore.core.routing_records import RoutingRecord
from moecore.core.safetensors_files import read_tensors
from moecore.measure import attack_audit
from moecore.measure.attack_audit import AuditSettings, EpsilonRow
from moecore.measure.base import SEED, MeasuredModel, Measurement, load_or_compute
from moecore.measure.routing_metrics.layer_metrics import choice_iou
from moecore.measure.values import SCORE, Metric, OnPage, Place, Values
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Task

PICTURES = 3  # attacked images shown, under the strongest attack
CHANGES = ("routing_change", "processing_change")
ROUTER_ATTACKS_PLACE = "router_attacks"  # of the worst score under all attacks on the routers
TRANSFERS = ("transfer-dense", "transfer-seed")  # images attacked on another model
TRANSFERRED_IMAGES_FILE = "images.safetensors"  # (N, C, H, W), by epsilon
MEAN_PLACE = "{} epsilons"  # place "epsilon" of the mean over this number of epsilons
Epsilon = Annotated[float, Field(ge=0, le=1)]
ATTACKED_SCORE_METRIC = Metric(
    "{title}, ε\u00a0=\u00a0{epsilon}",  # never broken into two lines
    SCORE,
    SCORE,
    paper="adversarial",
    over=("attack", "epsilon"),
    last="epsilon",
    name="{score}_{attack}",
    items="hits",
)
SCORE_AT_EPSILON_METRIC = ATTACKED_SCORE_METRIC._replace(
    last="", name="{score}_{attack}_{at}", items="exact", limits="", detail=True
)
METRICS = {
    "attacked": ATTACKED_SCORE_METRIC,
    "worst": ATTACKED_SCORE_METRIC._replace(over=("epsilon",)),
    "attacked_at": SCORE_AT_EPSILON_METRIC,
    "worst_at": SCORE_AT_EPSILON_METRIC._replace(over=("epsilon",)),
    "routing_change": Metric(
        "Routing change, {title}, ε\u00a0=\u00a0{epsilon}",
        "lower",
        note="1 − IoU of the experts that are chosen for a token at ε = {epsilon}, mean over "
        "layers",
        paper="adversarial",
        over=("attack", "epsilon"),
        last="epsilon",
        name="routing_change_{attack}",
    ),
    "processing_change": Metric(
        "Processing change, {title}, ε\u00a0=\u00a0{epsilon}",
        "lower",
        note="1 − IoU of the experts that process a token at ε = {epsilon}, mean over layers",
        paper="adversarial",
        over=("attack", "epsilon"),
        last="epsilon",
        name="processing_change_{attack}",
    ),
    "routing_change_layer": Metric(
        "Routing change, {title}, MoE {layer}, ε\u00a0=\u00a0{epsilon}",
        "lower",
        note="1 − IoU of the experts that are chosen at ε = {epsilon} in MoE layer {layer}",
        paper="adversarial",
        over=("attack", "layer", "epsilon"),
        last="epsilon",
        name="routing_change_{attack}_layer_{layer}",
        detail=True,
    ),
    "processing_change_layer": Metric(""),
    "clean": Metric(
        "{title}",
        SCORE,
        SCORE,
        note="without an attack, on the images that are attacked",
        paper="adversarial",
        name="clean_{score}",
        items="hits",
    ),
    "part": Metric(""),  # scores under each attack on the routers
    "loss": Metric("", note="of the task, mean over the attacked images alone"),
    "unchanged_images": Metric("", form="share", note="that the attack left as they were"),
}


class Robustness(Measurement):
    """Scores and routing under attacks within L∞ balls around the images."""

    metrics = METRICS
    page = OnPage("robustness", place=4, about="worst")

    images: int = Field(512, ge=1, description="Test images, drawn once for every method.")
    epsilons: tuple[Epsilon, ...] = Field(
        min_length=1,
        description="Radii of the L∞ ball in pixel units [0, 1]; 0 is added. An attack's eps "
        "replaces them for that attack.",
    )
    attacks: tuple[Attack, ...] = Field(min_length=1)
    routers: RouterAttacks | None = Field(None, description="On the routers, too; null: none.")
    transfer: Attack | None = Field(
        None,
        description="Attack on the dense model and on the next seed's, by the stage transferred, "
        "whose images this model gets; null: none.",
    )
    batch: int = Field(128, ge=1, description="Images per pass, rounded to groups of a capacity.")
    precision: Precision = Field("float32", description="Of the attack's passes; scores: float32.")
    survivors: bool = Field(False, description="Attack only right images; no routing change.")
    audit: AuditSettings = Field(AuditSettings(), description="Attacks that check the others.")

    def misfits(self, around: Surroundings) -> Misfits:
        if around.is_text:
            section = f"a section, but {around.data} is text"
            yield (), format_found_and_allowed(found=section, allowed="leave it out")
        if not any(self.epsilons):
            allowed = "at least one above 0"
            yield ("epsilons",), format_found_and_allowed(found="only 0", allowed=allowed)
        if self.survivors and (reason := around.lacks("share")):
            value = f"true, but {reason}"
            yield ("survivors",), format_found_and_allowed(found=value, allowed="false")

    @field_validator("attacks")
    @classmethod
    def _check_distinct_names(cls, attacks: tuple[Attack, ...]) -> tuple[Attack, ...]:
        if len({attack.name for attack in attacks}) < len(attacks):
            raise ValueError("the same attack is listed twice")
        return attacks

    @property
    def pieces(self) -> int:
        """Return the number of stored steps (attack at an epsilon, audit) if none is skipped."""
        attacks = [*self.attacks_by_name.values(), *[None] * len(self.transferred_names)]
        radii = [self.epsilons if each is None else each.radii(self.epsilons) for each in attacks]
        return 1 + sum(len({0.0, *each}) for each in radii)

    @property
    def attacks_on_routers(self) -> tuple[Attack, ...]:
        """Attacks on the routers; () if ``routers`` is None."""
        if self.routers is None:
            return ()
        return self.routers.parts

    @property
    def attacks_by_name(self) -> dict[str, Attack]:
        """Name → attack, for all attacks that run on the measured model, also on its routers."""
        return {attack.name: attack for attack in (*self.attacks, *self.attacks_on_routers)}

    @property
    def transferred_names(self) -> tuple[str, ...]:
        """Names of the transferred attacks; () if ``transfer`` is None."""
        if self.transfer is None:
            return ()
        return TRANSFERS

    def places(self) -> dict[str, Iterable[Place]]:
        radii = [epsilon for epsilon in self.epsilons if epsilon]
        mean = MEAN_PLACE.format(len(set(radii)))
        radii += [radius for attack in self.attacks for radius in attack.radii(())]
        names = [*self.transferred_names, *(attack.name for attack in self.attacks)]
        if self.routers is not None:
            names.append(ROUTER_ATTACKS_PLACE)
        return {"attack": names, "epsilon": [*radii, mean]}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: images, their number; task, of the scores; audit, its ``AuditLine``s; attacked, an
        # ``StrongestAttackGallery`` (None for volumes and without attacks).
        task = subject.data.task
        check_attack_settings(self, task)
        target = target_on_drawn_images(subject, self)
        out.people = target.people
        prediction, routing = target.predict_images(target.images)
        clean = CleanAnswers(prediction, routing, task.scores(prediction, target.labels))
        if self.survivors:
            target = target._replace(only=clean.scores)
        # Epsilon 0 checks that the model is deterministic, and is the start of the curves.
        epsilons = sorted({0.0, *self.epsilons})
        curves: dict[str, attack_audit.Curve] = {}
        parts = {part.name: ROUTER_ATTACKS_PLACE for part in self.attacks_on_routers}
        for name, attack in self.attacks_by_name.items():
            if reason := attack.does_not_apply(target.model, task):
                out.skipped.append(f"{parts.get(name, name)}: {reason}")
                continue
            radii = sorted({0.0, *attack.radii(self.epsilons)})
            curves[name] = measure_curve(attack, target, clean, radii, out)
        out.skipped = list(dict.fromkeys(out.skipped))
        for name in self.transferred_names:
            if name not in subject.transferred:
                out.skipped.append(f"{name}: the stage transferred attacked no such model")
                continue
            tensors, _ = read_tensors(subject.transferred[name] / TRANSFERRED_IMAGES_FILE)
            source = TransferredImages(name, tensors)
            curves[name] = measure_curve(source, target, clean, epsilons, out)
        # Comparisons of attacks leave out attacks that have a radius of their own.
        compared = [attack for attack in self.attacks_by_name.values() if not attack.radii(())]
        separate = {attack.name for attack in self.attacks if attack.radii(())}
        shared = {name: curve for name, curve in curves.items() if name not in separate}

        def audit_lines() -> list[dict[str, Any]]:
            lines = attack_audit.run_audit(target, self.audit, epsilons[-1], shared, compared)
            return [line.model_dump() for line in lines]

        out.facts["audit"] = out.parts("audit", audit_lines)
        images = len(target.labels)
        out.put("clean", clean.scores, task.interval(clean.scores, target.people))
        for name in (*self.transferred_names, *(attack.name for attack in self.attacks)):
            put_scores("attacked", curves.get(name, ()), images, out, attack=name)
            put_changes(curves.get(name, ()), out, name)
        put_router_attacks({name: curves[name] for name in parts if name in curves}, images, out)
        worst = attack_audit.compute_worst_curve_over_attacks(shared, task, images, target.people)
        put_scores("worst", worst, images, out)
        shown = attack_audit.build_strongest_attack_gallery(target, compared, PICTURES, shared)
        out.facts |= {"images": images, "task": task, "attacked": shown}


class CleanAnswers(NamedTuple):
    prediction: Tensor  # (N, K)
    routing: tuple[RoutingRecord, ...]  # by MoE layer
    scores: Tensor  # (N,)


def target_on_drawn_images(subject: MeasuredModel, settings: Robustness) -> Target:
    test = subject.data.test
    indices = draw_image_indices(len(test.labels), settings.images, SEED)
    labels = subject.model.targets(torch.from_numpy(test.labels[indices]))
    task, images = subject.data.task.with_gallery(labels), test.images[indices]
    sizes = (settings.batch, SEED, settings.precision)
    return Target(subject.model, task, images, labels, *sizes, people=test.people_at(indices))


def check_attack_settings(settings: Robustness, task: Task) -> None:
    if settings.survivors and (reason := task.needs_classes("share")):
        raise UserError.at("robustness.survivors", found=f"true, but {reason}", allowed="false")
    for number, attack in enumerate(settings.attacks):
        if reason := attack.refuses(task):
            raise UserError(
                f"robustness.attacks[{number}]: {reason}; allowed: fgsm, pgd or apgd with "
                "objective task, balance or routing_change"
            )


class TransferredImages(NamedTuple):
    """Images that were attacked on another model, measured like the result of an attack."""

    name: str
    images: Mapping[str, Tensor]  # epsilon, as text → (N, C, H, W) in [0, 1]


def measure_curve(
    attack: Attack | TransferredImages,
    target: Target,
    clean: CleanAnswers,
    epsilons: Sequence[float],
    out: Values,
) -> attack_audit.Curve:
    """Return a row per epsilon under one attack; finished rows are stored."""
    rows = []
    for epsilon in epsilons:
        compute = partial(measure_attack_at_epsilon, attack, target, clean, epsilon)
        rows.append(load_or_compute(out.parts, f"{attack.name} at {epsilon}", EpsilonRow, compute))
    return tuple(rows)


def put_router_attacks(curves: attack_audit.Curves, images: int, out: Values) -> None:
    """Put each image's worst score over router attacks; metric ``part``: score of each attack."""
    worst = attack_audit.compute_worst_curve_over_attacks(curves, out.task, images, out.people)
    put_scores("attacked", worst, images, out, attack=ROUTER_ATTACKS_PLACE)
    for name, rows in curves.items():
        for row in rows:
            out.put("part", Interval(row.score, row.low, row.high), part=name, epsilon=row.epsilon)


def put_scores(
    key: str,
    rows: Sequence[attack_audit.ScoresAtEpsilon],
    images: int,
    out: Values,
    **attack: Place,
) -> None:
    """Put ``{key}`` per ε; ``{key}_at``, without interval, per ε > 0 and for the mean over them."""
    scores_by_row = [out.task.decode_scores(row.scores, images).double().numpy() for row in rows]
    for row, scores in zip(rows, scores_by_row, strict=True):
        out.put(key, scores, Interval(row.score, row.low, row.high), **attack, epsilon=row.epsilon)
    for row, scores in zip(rows[1:], scores_by_row[1:], strict=True):
        out.put(f"{key}_at", scores, Interval(row.score), **attack, epsilon=row.epsilon)
    if rows[1:]:
        mean = Interval(float(np.mean([row.score for row in rows[1:]])))
        scores = np.mean(scores_by_row[1:], axis=0)
        out.put(f"{key}_at", scores, mean, **attack, epsilon=MEAN_PLACE.format(len(rows) - 1))


def put_changes(rows: Sequence[EpsilonRow], out: Values, attack: str) -> None:
    for row in rows:
        at = {"attack": attack, "epsilon": row.epsilon}
        out.put("loss", row.loss, **at)
        out.put("unchanged_images", row.unchanged_images, **at)
        for key in CHANGES:
            layers: tuple[float, ...] = getattr(row, key)
            if layers:
                out.put(key, np.array(row.items[key]), Interval(sum(layers) / len(layers)), **at)
            for layer, change in enumerate(layers, 1):
                out.put(f"{key}_layer", change, attack=attack, layer=layer, epsilon=row.epsilon)


def measure_attack_at_epsilon(
    attack: Attack | TransferredImages, target: Target, clean: CleanAnswers, epsilon: float
) -> EpsilonRow:
    """Return scores, loss and routing at one epsilon; UserError if 0 changes a prediction."""
    if isinstance(attack, TransferredImages):
        adversarial = attack.images[str(epsilon)] if epsilon else target.clean_images()
    else:
        adversarial = target.attacked(attack, epsilon)
    prediction, routing = target.predict_images(adversarial)
    if epsilon == 0 and not torch.equal(prediction, clean.prediction):
        raise UserError(
            f"robustness: {attack.name} at epsilon 0 changes predictions; the model is not "
            "deterministic in evaluation mode"
        )
    task = target.task
    unchanged = (adversarial == target.clean_images()).flatten(1).all(1)
    changes: dict[str, Any] = {"routing_change": (), "processing_change": ()}
    # With attacks on survivors alone, the routing of other images would count as unchanged.
    if target.only is None:
        overlaps = expert_overlaps(clean.routing, routing)
        for name, layers in overlaps.items():
            changes[name] = [1 - float(iou.mean()) for iou in layers]
        if routing:
            changes["items"] = {
                name: torch.stack([1 - iou.mean(-1) for iou in layers]).mean(dim=0).tolist()
                for name, layers in overlaps.items()
            }
    return EpsilonRow.of(
        epsilon,
        task,
        task.worse_scores(clean.scores, task.scores(prediction, target.labels)),
        target.people,
        loss=float(task.test_loss(prediction, target.labels).mean()),
        unchanged_images=float(unchanged.double().mean()),
        **changes,
    )


def expert_overlaps(
    before: tuple[RoutingRecord, ...], after: tuple[RoutingRecord, ...]
) -> dict[str, list[Tensor]]:
    """Return key of CHANGES → IoU of chosen or processing experts before and after, (N, T) each."""
    pairs = list(zip(before, after, strict=True))
    return {
        "routing_change": [choice_iou(a.chosen, b.chosen) for a, b in pairs],
        "processing_change": [choice_iou(a.combine != 0, b.combine != 0) for a, b in pairs],
    }
