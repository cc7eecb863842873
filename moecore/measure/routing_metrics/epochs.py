"""Stability of the choice of experts: between two views of an image (PRC), and over epochs (TGR).

B images, P pairs of corresponding tokens per image, E experts; N images of the epochs, T tokens.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, TokenLayout, first_choices
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.data.prepared import Prepared
from moecore.measure.exploring.watched import read_epoch_traces, watched_epochs, write_epoch_trace
from moecore.measure.routing_metrics.imed import class_expert_probs
from moecore.measure.routing_metrics.layer_metrics import expert_agreement, kept_choices
from moecore.measure.routing_metrics.regions import (
    probed_epochs,
    read_epoch_tissue_routing,
    write_epoch_tissue_routing,
)
from moecore.nn.backbones.base_model import Model, majority_token_kinds
from moecore.nn.predict import image_batches, predict_in_batches
from moecore.nn.routing_traces import finest_layout, spread_to_one_grid
from moecore.statistics.comparisons import encode_item_values, linearize_ratio
from moecore.training.outcome import Settling


class MatchRatios(NamedTuple):
    """Shares of pairs that choose the same, 0 to 1."""

    top1: float  # best expert
    top2_ordered: float  # best and second in this order
    top2_sets: float  # two best as a set


def match_counts_by_image(probs_1: Tensor, probs_2: Tensor, is_pair: Tensor) -> Tensor:
    """Count each image's pairs that agree, (B, 3) int64; in a tie the lowest expert is best.

    Columns: best expert, best and second in this order, two best as a set. probs_1, probs_2:
    (B, P, E), both sides of each pair; is_pair: (B, P) bool, which pairs exist.
    """
    if probs_1.shape[-1] < 2 or not is_pair.any():
        raise UserError.at(
            "consistency",
            found=f"{int(is_pair.sum())} pairs and {probs_1.shape[-1]} experts",
            allowed="at least one pair and two experts",
        )
    ours = _two_best(probs_1)
    theirs = _two_best(probs_2)
    ordered = ours == theirs
    sets = ordered.all(-1) | (ours == theirs.flip(-1)).all(-1)
    return torch.stack(
        [(same & is_pair).sum(dim=1) for same in (ordered[..., 0], ordered.all(-1), sets)], dim=1
    )


def match_ratios(probs_1: Tensor, probs_2: Tensor, is_pair: Tensor) -> MatchRatios:
    """Return the match ratios of corresponding tokens' experts, over all pairs (PRC, table 4)."""
    counts = match_counts_by_image(probs_1, probs_2, is_pair).sum(dim=0)
    pairs = int(is_pair.sum())
    return MatchRatios(*(count / pairs for count in counts.tolist()))


def agreement_over_epochs(first_experts: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Return the share of tokens with the best expert of the final, and of the previous, epoch.

    first_experts: per epoch, (N, T) integers, the best expert of each token of the same N images.
    ``with_final``: one value per epoch, the last is 1; ``consecutive``: one per pair of epochs.
    """
    epochs = _check_epochs(first_experts)
    return {
        "with_final": [_agreeing_share(experts, epochs[-1]) for experts in epochs],
        "consecutive": [_agreeing_share(before, after) for before, after in pairwise(epochs)],
    }


def _check_epochs(first_experts: Sequence[np.ndarray]) -> list[np.ndarray]:
    epochs = [np.asarray(experts) for experts in first_experts]
    shapes = sorted({experts.shape for experts in epochs})
    if len(shapes) != 1 or epochs[0].size == 0:
        raise UserError.at(
            "consistency",
            found=f"{len(epochs)} epochs with choices of shape {shapes}",
            allowed="at least one epoch, all of one shape (images, tokens)",
        )
    return epochs


def _two_best(probs: Tensor) -> Tensor:
    # topk does not define the order of ties
    return probs.argsort(dim=-1, descending=True, stable=True)[..., :2]


def _agreeing_share(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((ours == theirs).mean())


def expert_truth_tables(
    experts: np.ndarray, kinds: np.ndarray, expert_count: int, kind_count: int
) -> np.ndarray:
    """Count each expert's tokens of each kind per image, int64 (N, E, D).

    experts: (N, T), 0 to E − 1, or −1 for none; kinds: (N, T), 1 to D, or 0 if unknown. Tokens
    without expert or kind are not counted.
    """
    cell = np.where(experts < 0, 0, experts * (kind_count + 1) + kinds)
    width = expert_count * (kind_count + 1)
    rows = np.arange(len(cell))[:, None] * width
    counts = np.bincount((rows + cell).ravel(), minlength=len(cell) * width)
    return counts.reshape(-1, expert_count, kind_count + 1)[:, :, 1:]


def token_kinds(images: Tensor, layout: TokenLayout) -> Tensor:
    """Return each token's kind, (N, T), from the last channel of stored images."""
    (last,) = image_batches(images[:, -1:], len(images))
    return majority_token_kinds(last, layout)


def expert_purity(table: np.ndarray) -> float:
    """Return the share of tokens of their expert's most frequent kind, from counts (E, D).

    NaN without tokens.
    """
    return float(table.max(axis=1).sum() / table.sum()) if table.any() else math.nan


def purity_by_image(tables: np.ndarray) -> np.ndarray:
    """Return ``expert_purity`` of the summed tables (N, E, D) as one value per image, (N,).

    Each image's influence (jackknife) with every expert's most frequent kind fixed.
    """
    kind = tables.sum(axis=0).argmax(axis=1)
    right = tables[:, np.arange(len(kind)), kind].sum(axis=1)
    return linearize_ratio(right, tables.sum(axis=(1, 2)))


def purity_over_layers(tables: Sequence[np.ndarray]) -> float:
    """Return the mean purity of the layers' tables (E, D)."""
    return float(np.mean([expert_purity(table) for table in tables]))


def purity_by_epoch(
    first: Sequence[np.ndarray], kinds: np.ndarray, expert_count: int, kind_count: int
) -> list[float]:
    """Return the layers' mean purity after each epoch; first: per epoch first experts (N, L, T)."""
    return [
        purity_over_layers(
            [
                expert_truth_tables(layer, kinds, expert_count, kind_count).sum(axis=0)
                for layer in epoch.astype(np.int64).swapaxes(0, 1)
            ]
        )
        for epoch in first
    ]


IMAGES = 500  # of the validation split


class EpochWatch(NamedTuple):
    """Records the routing at the end of each epoch of a training, in a ``folder`` that is kept."""

    folder: Path
    model: Model  # as evaluated, on its device
    data: Prepared
    experts: tuple[str, ...]  # their names
    epochs: int
    seed: int  # of the random control of tissues, the same at all epochs

    def look(self, epoch: int) -> float | None:
        """Store the routing of validation images after ``epoch`` (from 1).

        Return the share of tokens with the same first expert as after the previous epoch, mean over
        layers; None for the first epoch and for a dense model.
        """
        if self.model.moe is None:
            return None
        images = self.data.validation.images[:IMAGES]
        labels = torch.from_numpy(np.array(self.data.validation.labels[:IMAGES]))
        _, records = predict_in_batches(self.model, images, batch=250, prediction=False)
        on_one_grid = spread_to_one_grid(records, self.model.layouts)
        first = torch.stack([first_choices(record) for record in on_one_grid], dim=1)
        chosen = np.stack([record.chosen.numpy() for record in on_one_grid], axis=1)
        tensors = {
            "first": first.to(torch.int16),  # (N, layers, T)
            # (N, layers, T, bytes of E bits)
            "chosen": torch.from_numpy(np.packbits(chosen, axis=-1)),
        }
        maps = routing_maps_by_class(records, labels, self.data)
        if maps is not None:
            tensors["maps"] = maps.float()
        write_tensors(_epoch_path(self.folder, epoch), tensors)
        if epoch in probed_epochs(self.epochs):
            write_epoch_tissue_routing(
                self.folder, epoch, self.model, self.data, self.experts, self.seed
            )
        if epoch in watched_epochs(self.epochs) and not self.data.task.long:
            write_epoch_trace(self.folder, epoch, self.model, self.data)
        if epoch == 1:
            return None
        before, _ = read_tensors(_epoch_path(self.folder, epoch - 1))
        return float((tensors["first"] == before["first"]).double().mean())

    def collect_settling(self) -> Settling:
        """Return the stored routing of all epochs; raise UserError if a file is missing."""
        if self.model.moe is None:
            return Settling()
        epochs = range(1, self.epochs + 1)
        stored = [read_tensors(_epoch_path(self.folder, epoch))[0] for epoch in epochs]
        first = [tensors["first"].numpy() for tensors in stored]
        agreement = agreement_over_epochs([experts.reshape(len(experts), -1) for experts in first])
        people = self.data.validation.people
        if people is not None:
            people = people[:IMAGES]
        saturation = saturation_by_image([tensors["chosen"].numpy() for tensors in stored])
        half = encode_item_values(saturation[(self.epochs - 1) // 2], people)
        mapped = [epoch for epoch in shown_epochs(self.epochs) if "maps" in stored[epoch - 1]]
        is_text = self.data.task.long
        return Settling(
            agreement_with_final=agreement["with_final"],
            agreement_consecutive=agreement["consecutive"],
            saturation=[float(shares.mean()) for shares in saturation],
            agreement_items=agreement_items(first, people) | {"saturation_half": half},
            purity=self._purity(first) if self.model.image.truth else (),
            class_maps={str(epoch): _round_maps(stored[epoch - 1]["maps"]) for epoch in mapped},
            region_routing=read_epoch_tissue_routing(self.folder, self.data, self.epochs),
            watched=() if is_text else read_epoch_traces(self.folder, self.data, self.epochs),
        )

    def _purity(self, first: Sequence[np.ndarray]) -> list[float]:
        images = torch.from_numpy(np.array(self.data.validation.images[:IMAGES]))
        kinds = token_kinds(images, finest_layout(self.model.layouts)).numpy()
        number = self.model.experts_and_router.experts.choices
        return purity_by_epoch(first, kinds, number, self.model.image.truth)


def saturation_by_image(chosen: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return, per epoch, each image's share of final experts that its tokens already had, (N,).

    Mean over layers and tokens (OLMoE, §5.1). chosen: per epoch, (N, L, T, bytes of E bits).
    """

    def unpack(packed: np.ndarray) -> Tensor:
        return torch.from_numpy(np.unpackbits(packed, axis=-1)).bool()

    final = unpack(chosen[-1])
    return [kept_choices(unpack(packed), final).mean(dim=(1, 2)).numpy() for packed in chosen]


def agreement_items(first: Sequence[np.ndarray], people: np.ndarray | None) -> dict[str, str]:
    """Return each item's share of tokens that agree, at a quarter, half and the end of training.

    With the final epoch, and between consecutive epochs; the latter also as mean over training.
    first: per epoch, (N, L, T) integers.
    """
    epochs = len(first)

    def encode_agreement(*pairs: tuple[int, int]) -> str:
        same = [(first[epoch] == first[other]).mean(axis=(1, 2)) for epoch, other in pairs]
        return encode_item_values(np.mean(same, axis=0), people)

    packed = {}
    for name, index in (("quarter", (epochs - 1) // 4), ("half", (epochs - 1) // 2)):
        packed[f"with_final_{name}"] = encode_agreement((index, epochs - 1))
    if epochs == 1:
        return packed
    pairs = [(epoch, epoch + 1) for epoch in range(epochs - 1)]
    for name, index in (
        ("quarter", (epochs - 2) // 4),
        ("half", (epochs - 2) // 2),
        ("last", epochs - 2),
    ):
        packed[f"consecutive_{name}"] = encode_agreement(pairs[index])
    return packed | {"consecutive_mean": encode_agreement(*pairs)}


def finetuning_agreement(
    before: Sequence[RoutingRecord],
    after: Sequence[RoutingRecord],
    people: np.ndarray | None = None,
) -> Settling:
    """Return the agreement of the routing before and after fine-tuning, per layer."""
    same = expert_agreement(before, after)
    if not same:
        return Settling(routing_agreement_before_after=())
    by_image = torch.stack(same)
    items = {"before_after": encode_item_values(by_image.mean(dim=0).numpy(), people)}
    means = by_image.mean(dim=1).tolist()
    return Settling(routing_agreement_before_after=means, agreement_items=items)


def shown_epochs(epochs: int) -> list[int]:
    """Return the epochs, from 1, whose class maps are shown: first, after each third, last."""
    return sorted({1, max(1, epochs // 3), max(1, 2 * epochs // 3), epochs})


def routing_maps_by_class(
    records: Sequence[RoutingRecord], labels: Tensor, data: Prepared
) -> Tensor | None:
    """Return class maps (K, layers, E); None if labels are not classes.

    An image of several classes counts for each of them.
    """
    members = data.task.by_class(labels)
    if members is None:
        return None
    rows, classes = members
    chosen = [record._replace(probs=record.probs[rows]) for record in records]
    return class_expert_probs(chosen, classes, data.task.outputs)


def _round_maps(maps: Tensor) -> list:
    # Pages show three digits; five decimals limit the size of results with many classes.
    return [[[round(value, 5) for value in layer] for layer in row] for row in maps.tolist()]


def _epoch_path(folder: Path, epoch: int) -> Path:
    return folder / "epochs" / f"{epoch:04d}.safetensors"
