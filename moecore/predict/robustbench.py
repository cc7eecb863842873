"""An entry for RobustBench's leaderboard (Croce et al. 2021), and a model as its code takes one."""

from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moecore.attacks.attack_target import Target
from moecore.attacks.autoattack import Autoattack
from moecore.core.files import UserError, write_json
from moecore.data.prepared import Prepared
from moecore.nn.backbones.base_model import Model
from moecore.predict.export import refuse_unexportable
from moecore.report.tables.cells import NumberFormat
from moecore.training import artifacts, runtime

NORMS = {"Linf": "linf", "L2": "l2"}  # RobustBench's name → ours
AUTHORS_FIELDS = ("link", "name", "authors", "venue")  # that only the authors know


class LogitsModel(nn.Module):
    """A model that returns its logits alone, as ``robustbench.benchmark`` expects.

    ``benchmark(LogitsModel(load_model(folder)), dataset="cifar10", threat_model="Linf")`` then
    evaluates a model that was trained on CIFAR-10's 32 × 32 pixels.

    Args:
        model: of ``load_model``. Its ``forward`` takes images (B, C, H, W) in [0, 1].
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, K) of images (B, C, H, W) in [0, 1]."""
        return self.model(images).prediction


def attack_and_write_robustbench_entry(
    folder: Path, data: Path, eps: str, norm: Literal["Linf", "L2"], images: int, out: Path
) -> str:
    """Attack the first test images by AutoAttack, write RobustBench's JSON, return a summary."""
    # eps: as the leaderboard writes it, such as 8/255. The first images, as RobustBench takes them.
    radius = parse_radius(eps)
    model = artifacts.load_model(folder).to(runtime.tune_runtime().device)
    refuse_unexportable(folder, model, "entered in RobustBench, which passes images alone")
    attack = Autoattack.model_validate({"norm": NORMS[norm], "eps": radius})
    largest = attack.largest_radius((model.image.channels, *model.image.shape))
    if radius > largest:
        raise UserError.at("--eps", found=eps, allowed=f"at most {largest:.4g} ({norm})")
    prepared = Prepared.open(data)
    if reason := attack.does_not_apply(model, prepared.task):
        raise UserError(f"{folder}: {reason}")
    pixels = prepared.test.images[:images]
    labels = model.targets(torch.from_numpy(prepared.test.labels[:images]))
    target = Target(model, prepared.task, pixels, labels, batch=250)
    clean = target.scores(pixels)
    attacked = target._replace(only=clean > 0).attacked(attack, radius)
    robust = prepared.task.worse_scores(clean, target.scores(attacked))
    percents = {}
    phrases = []
    for key, title, scores in (
        ("clean_acc", "accuracy", clean),
        ("autoattack_acc", f"under AutoAttack, {norm}, ε = {eps}", robust),
    ):
        interval = prepared.task.interval(scores)
        percents[key] = f"{100 * interval.value:.2f}"
        shown = NumberFormat.of("share", [interval]).value_with_limits(interval, "[]")
        phrases.append(f"{title} {shown}")
    card = artifacts.load_model_card(folder)
    dataset = "".join(filter(str.isalnum, prepared.card["name"].lower()))  # cifar10
    write_json(out, describe_unscored_entry(card, dataset, eps) | percents)
    to_fill = ", ".join(AUTHORS_FIELDS)
    return f"{out}: {'; '.join(phrases)}; {len(labels):,} images; fill in {to_fill}"


def describe_unscored_entry(card: artifacts.ModelCard, dataset: str, eps: str) -> dict[str, Any]:
    """Return the entry's fields without accuracies; those that only the authors know are empty."""
    return dict.fromkeys(AUTHORS_FIELDS, "") | {
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": dataset,
        "architecture": describe_architecture(card),
        "eps": eps,
        "reported": "",
        "unreliable": False,
        "footnote": "",
    }


def describe_architecture(card: artifacts.ModelCard) -> str:
    if card.moe is None:
        return card.backbone.kind
    experts, router = card.moe.experts, card.moe.router
    chosen = f", {router.k} per token" if hasattr(router, "k") else ""
    return f"{card.backbone.kind} with {experts.number} experts{chosen} ({router.kind})"


def parse_radius(eps: str) -> float:
    try:
        radius = float(Fraction(eps))
    except (ValueError, ZeroDivisionError):
        radius = 0.0
    if radius > 0:
        return radius
    raise UserError.at("--eps", found=eps, allowed="a number above 0, such as 8/255 or 0.5")
