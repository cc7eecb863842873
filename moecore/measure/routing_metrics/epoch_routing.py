"""Record routing after each epoch; agreement of views (PRC) and epochs (TGR), and purity.

The routing after each epoch is stored next to the checkpoint, so that a resumed training reports
all epochs; nothing is selected by it. P pairs of corresponding tokens per image. Experts of the
last MoE layer on volumes with one of R tissues, and on a random control (ERMoE-ba, supplement §3).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool3d

from moecore.core.files import UserError, read_json, write_json
from moecore.core.routing_records import RoutingRecord, TokenLayout, first_choices
from moecore.core.safetensors_files import read_tensors, write_tensors
from moecore.core.streams import derived_seed
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.measure.routing_metrics import layer_metrics
from moecore.nn import encoded_routing, predict
from moecore.nn.backbones.base_model import Model, majority_token_kinds
from moecore.statistics.comparisons import encode_item_values, linearize_ratio
from moecore.training import outcome
from moecore.training.single_tissue_volumes import keep_only_tissue


def count_token_pair_matches_by_image(probs_1: Tensor, probs_2: Tensor, is_pair: Tensor) -> Tensor:
    """Count token pairs with equal top 1, ordered top 2 and set of top 2, (B, 3); ties: lowest."""
    # Columns: best expert, best and second in this order, two best as a set. probs_1, probs_2:
    # (B, P, E), both sides of each pair; is_pair: (B, P) bool, which pairs exist.
    if probs_1.shape[-1] < 2 or not is_pair.any():
        raise UserError.at(
            "consistency",
            found=f"{int(is_pair.sum())} pairs and {probs_1.shape[-1]} experts",
            allowed="at least one pair and two experts",
        )
    # topk does not define the order of ties
    ours, theirs = (
        probs.argsort(dim=-1, descending=True, stable=True)[..., :2] for probs in (probs_1, probs_2)
    )
    ordered = ours == theirs
    sets = ordered.all(-1) | (ours == theirs.flip(-1)).all(-1)
    matches = (ordered[..., 0], ordered.all(-1), sets)
    return torch.stack([(same & is_pair).sum(dim=1) for same in matches], dim=1)


def compare_with_final_and_next(first_experts: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Return "with_final" and "consecutive" → shares of tokens with equal best experts."""
    # first_experts: per epoch, (N, T) integers, the best expert of each token of the same N images.
    # ``with_final``: one value per epoch, the last is 1; ``consecutive``: one per pair of epochs.
    shapes = sorted({experts.shape for experts in first_experts})
    if len(shapes) != 1 or first_experts[0].size == 0:
        raise UserError.at(
            "consistency",
            found=f"{len(first_experts)} epochs with choices of shape {shapes}",
            allowed="at least one epoch, all of one shape (images, tokens)",
        )
    final = first_experts[-1]
    pairs = pairwise(first_experts)
    return {
        "with_final": [float((experts == final).mean()) for experts in first_experts],
        "consecutive": [float((before == after).mean()) for before, after in pairs],
    }


def expert_kind_counts(
    experts: np.ndarray, kinds: np.ndarray, expert_count: int, kind_count: int
) -> np.ndarray:
    """Count each expert's tokens of each kind per image, int64 (N, E, D)."""
    # experts: (N, T), 0 to E − 1, or −1 for none; kinds: (N, T), 1 to D, or 0 if unknown. Tokens
    # without expert or kind are not counted.
    cell = np.where(experts < 0, 0, experts * (kind_count + 1) + kinds)
    width = expert_count * (kind_count + 1)
    rows = np.arange(len(cell))[:, None] * width
    counts = np.bincount((rows + cell).ravel(), minlength=len(cell) * width)
    return counts.reshape(-1, expert_count, kind_count + 1)[:, :, 1:]


def true_kinds(images: Tensor, layout: TokenLayout) -> Tensor:
    """Return each token's true kind, (N, T), 0 if unknown, from the images' last channel."""
    (last,) = predict.image_batches(images[:, -1:], len(images))
    return majority_token_kinds(last, layout)


def expert_purity(table: np.ndarray) -> float:
    """Return the share of tokens of their expert's main kind; counts (E, D); NaN if empty."""
    if table.any():
        return float(table.max(axis=1).sum() / table.sum())
    return math.nan


def average_purity_over_layers(tables: Sequence[np.ndarray]) -> float:
    return float(np.mean([expert_purity(table) for table in tables]))


def purity_by_image(tables: np.ndarray) -> np.ndarray:
    """Return ``expert_purity`` of all images as jackknife pseudo-values (N,); counts: (N, E, D)."""
    # Each image's influence (jackknife) with every expert's most frequent kind fixed.
    kind = tables.sum(axis=0).argmax(axis=1)
    right = tables[:, np.arange(len(kind)), kind].sum(axis=1)
    return linearize_ratio(right, tables.sum(axis=(1, 2)))


def purity_by_epoch(
    first: Sequence[np.ndarray], kinds: np.ndarray, expert_count: int, kind_count: int
) -> list[float]:
    """Return each epoch's purity, mean over layers; first: per epoch, first experts (N, L, T)."""
    purities = []
    for epoch in first:
        layers = epoch.astype(np.int64).swapaxes(0, 1)
        counts = [expert_kind_counts(layer, kinds, expert_count, kind_count) for layer in layers]
        purities.append(average_purity_over_layers([tables.sum(axis=0) for tables in counts]))
    return purities


VALIDATION_IMAGES = 500  # of the validation split


class EpochRecorder(NamedTuple):
    """Stores the routing after each epoch of a training in files below ``folder``."""

    folder: Path
    model: Model  # as evaluated, on its device
    data: Prepared
    experts: tuple[str, ...]  # their names
    epochs: int
    seed: int  # of the random control of tissues, the same at all epochs

    def record(self, epoch: int) -> float | None:
        """Store validation routing after ``epoch`` ≥ 1; return agreement with the one before."""
        # Return the share of tokens with the same first expert as after the previous epoch, mean
        # over layers; None for the first epoch and for a dense model.
        if self.model.moe is None:
            return None
        images = self.data.validation.images[:VALIDATION_IMAGES]
        labels = torch.from_numpy(np.array(self.data.validation.labels[:VALIDATION_IMAGES]))
        _, records = predict.predict_in_batches(self.model, images, batch=250, prediction=False)
        on_one_grid = encoded_routing.put_records_on_finest_grid(records, self.model.layouts)
        first = torch.stack([first_choices(record) for record in on_one_grid], dim=1)
        chosen = np.stack([record.chosen.numpy() for record in on_one_grid], axis=1)
        tensors = {
            "first": first.to(torch.int16),  # (N, layers, T)
            # (N, layers, T, bytes of E bits)
            "chosen": torch.from_numpy(np.packbits(chosen, axis=-1)),
        }
        if members := self.data.task.by_class(labels):
            # An image of several classes counts for each of them.
            rows, classes = members
            routed = [record._replace(probs=record.probs[rows]) for record in records]
            maps = layer_metrics.class_expert_probs(routed, classes, self.data.task.outputs)
            tensors["maps"] = maps.float()  # (K, layers, E)
        write_tensors(self.folder / f"epochs/{epoch:04d}.safetensors", tensors)
        if epoch in choose_tissue_routing_epochs(self.epochs):
            self.write_tissue_routing(epoch)
        if epoch in choose_explorer_epochs(self.epochs) and not self.data.task.long:
            self.write_trace(epoch)
        if epoch == 1:
            return None
        before, _ = read_tensors(self.folder / f"epochs/{epoch - 1:04d}.safetensors")
        return float((tensors["first"] == before["first"]).double().mean())

    def collect_routing(self) -> outcome.RoutingOverTraining:
        """Return stored agreement, saturation and purity by epoch; UserError if one is missing."""
        if self.model.moe is None:
            return outcome.RoutingOverTraining()
        epochs = self.epochs
        names = [f"epochs/{epoch:04d}.safetensors" for epoch in range(1, epochs + 1)]
        stored = [read_tensors(self.folder / name)[0] for name in names]
        first = [tensors["first"].numpy() for tensors in stored]
        agreement = compare_with_final_and_next([epoch.reshape(len(epoch), -1) for epoch in first])
        people = self.data.validation.people
        if people is not None:
            people = people[:VALIDATION_IMAGES]
        saturation = saturation_by_image([tensors["chosen"].numpy() for tensors in stored])
        half = encode_item_values(saturation[(epochs - 1) // 2], people)
        purity = []
        if kind_count := self.model.image.truth:
            images = torch.from_numpy(np.array(self.data.validation.images[:VALIDATION_IMAGES]))
            kinds = true_kinds(images, encoded_routing.finest_layout(self.model.layouts)).numpy()
            number = self.model.experts_and_router.experts.choices
            purity = purity_by_epoch(first, kinds, number, kind_count)
        maps = {}
        for epoch in sorted({1, max(1, epochs // 3), max(1, 2 * epochs // 3), epochs}):
            if "maps" in stored[epoch - 1]:
                # Pages show three digits; five decimals limit the size with many classes.
                rows = stored[epoch - 1]["maps"].tolist()
                maps[str(epoch)] = [[[round(x, 5) for x in layer] for layer in row] for row in rows]
        is_text = self.data.task.long
        return outcome.RoutingOverTraining(
            agreement_with_final=agreement["with_final"],
            agreement_consecutive=agreement["consecutive"],
            saturation=[float(shares.mean()) for shares in saturation],
            agreement_items=encode_agreement_of_epochs(first, people) | {"saturation_half": half},
            purity=purity,
            class_maps=maps,
            region_routing=self.read_tissue_routing(),
            watched=() if is_text else self.read_traces(),
        )

    def write_tissue_routing(self, epoch: int) -> None:
        tissues = self.data.card.get("regions")
        if not tissues:
            return
        chosen = evenly_spaced_indices(len(self.data.validation.labels), TISSUE_VOLUMES)
        volumes = np.array(self.data.validation.images[chosen])
        maps = np.array(self.data.regions("validation")[chosen])
        rows = route_single_tissues(self.model, volumes, maps, tissues, self.experts, self.seed)
        routing = outcome.EpochTissueRouting(epoch=epoch, rows=rows)
        write_json(self.folder / f"regions/{epoch:04d}.json", routing.model_dump(mode="json"))

    def read_tissue_routing(self) -> tuple[outcome.EpochTissueRouting, ...]:
        if not self.data.card.get("regions"):
            return ()
        epochs = choose_tissue_routing_epochs(self.epochs)
        contents = [read_json(self.folder / f"regions/{epoch:04d}.json") for epoch in epochs]
        return tuple(outcome.EpochTissueRouting.model_validate(content) for content in contents)

    def write_trace(self, epoch: int) -> None:
        """Write predictions and routing of the explorer's images after ``epoch``, as JSON."""
        images = np.array(self.data.test.images[explorer_image_indices(self.data, MAX_IMAGES)])
        prediction, records = predict.predict_in_batches(self.model, images, batch=MAX_IMAGES)
        task, layouts = self.data.task, self.model.layouts
        traces = encoded_routing.encode_predictions_and_records(prediction, records, task, layouts)
        write_json(self.folder / f"traces/{epoch:04d}.json", traces.model_dump(mode="json"))

    def read_traces(self) -> tuple[outcome.WatchedImagesRouting, ...]:
        """Return predictions and routing of ``choose_explorer_epochs``; UserError if missing."""
        places = explorer_image_indices(self.data, MAX_IMAGES)
        watched = []
        for epoch in choose_explorer_epochs(self.epochs):
            content = read_json(self.folder / f"traces/{epoch:04d}.json")
            trace = encoded_routing.EncodedPredictionsAndRouting.model_validate(content)
            watched.append(outcome.WatchedImagesRouting(epoch=epoch, images=places, trace=trace))
        return tuple(watched)


def saturation_by_image(chosen: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return, per epoch, each image's share of final experts that its tokens already had, (N,)."""
    # Mean over layers and tokens (OLMoE, §5.1). chosen: per epoch, (N, L, T, bytes of E bits).

    def unpack(packed: np.ndarray) -> Tensor:
        return torch.from_numpy(np.unpackbits(packed, axis=-1)).bool()

    final = unpack(chosen[-1])
    return [
        layer_metrics.inherited_share(unpack(packed), final).mean(dim=(1, 2)).numpy()
        for packed in chosen
    ]


def encode_agreement_of_epochs(
    first: Sequence[np.ndarray], people: np.ndarray | None
) -> dict[str, str]:
    """Encode shares (N,) of equal first experts; key "with_final_half": middle and last epoch."""
    # "with_final" and "consecutive" at a quarter and half of the epochs; "consecutive" also at the
    # end and as mean. first: per epoch, (N, L, T) integers; people: (N,).
    last = len(first) - 1

    def encode_agreement(*pairs: tuple[int, int]) -> str:
        same = [(first[epoch] == first[other]).mean(axis=(1, 2)) for epoch, other in pairs]
        return encode_item_values(np.mean(same, axis=0), people)

    packed = {
        "with_final_quarter": encode_agreement((last // 4, last)),
        "with_final_half": encode_agreement((last // 2, last)),
    }
    if last == 0:
        return packed
    pairs = [(epoch, epoch + 1) for epoch in range(last)]
    return packed | {
        "consecutive_quarter": encode_agreement(pairs[(last - 1) // 4]),
        "consecutive_half": encode_agreement(pairs[(last - 1) // 2]),
        "consecutive_last": encode_agreement(pairs[-1]),
        "consecutive_mean": encode_agreement(*pairs),
    }


def finetuning_agreement(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord], people: np.ndarray | None
) -> outcome.RoutingOverTraining:
    """Return each layer's share of tokens with equal first experts before and after fine-tuning."""
    same = layer_metrics.expert_agreement(before, after)
    if not same:
        return outcome.RoutingOverTraining(routing_agreement_before_after=())
    by_image = torch.stack(same)
    items = {"before_after": encode_item_values(by_image.mean(dim=0).numpy(), people)}
    means = by_image.mean(dim=1).tolist()
    return outcome.RoutingOverTraining(routing_agreement_before_after=means, agreement_items=items)


TISSUE_VOLUMES = 24  # of the validation split, evenly spread over it


def choose_tissue_routing_epochs(epochs: int) -> tuple[int, ...]:
    return tuple(sorted({1, (epochs + 1) // 2, epochs}))


# The explorer shows the routing of its first test images after some epochs.
MAX_IMAGES = 32  # the largest number in the explorer
MAX_VOLUMES = 6  # fewer, as volumes are large
MAX_EXPLORER_EPOCHS = 12


def nested_spread_indices(total: int, number: int) -> list[int]:
    # A larger number extends the list: the indices follow van der Corput's sequence of base 2, that
    # is start, middle, quarters, and so on.
    places: dict[int, None] = {}
    step = 0
    while len(places) < min(number, total):
        places.setdefault(int(f"{step:b}"[::-1], 2) * total >> step.bit_length())
        step += 1
    return list(places)


def explorer_image_indices(data: Prepared, number: int) -> list[int]:
    """Return indices in the test split of the ``number`` images that the explorer shows first."""
    images = data.test.images
    limit = MAX_VOLUMES if images.ndim == 5 else MAX_IMAGES
    return nested_spread_indices(len(images), min(number, limit))


def choose_explorer_epochs(epochs: int) -> tuple[int, ...]:
    spread = np.linspace(epochs, 1, min(epochs, MAX_EXPLORER_EPOCHS)).round().astype(int)
    return tuple(np.unique(spread).tolist())


BEST_EXPERTS_PER_TISSUE = 2  # experts named per tissue, as in figure S1


def route_single_tissues(
    model: Model,
    volumes: np.ndarray,  # (N, 1, D, H, W) floating point in [0, 1]
    regions: np.ndarray,  # uint8 (N, R, D, H, W), tissue share × 255
    tissues: Sequence[str],
    experts: Sequence[str],  # names of the E experts
    seed: int = 0,
) -> list[outcome.TissueRoutingRow]:
    """Route volumes of one tissue each, and of its voxels shuffled in the brain; a row for each."""
    # A control, ``random_<tissue>``, has the tissue's shares permuted among the brain's voxels. A
    # row has the two experts with the highest mean score (the router's logits before noise; cosines
    # for an eigenbasis router), and the share of tokens that chose each expert. Means are over
    # tokens whose cube has any remaining voxel. Shares sum to the experts per token, or less if an
    # eigenbasis router prunes choices.
    if len(volumes) != len(regions) or regions.shape[1] != len(tissues):
        raise UserError(
            f"region routing: {len(volumes)} volumes, and maps of shape {regions.shape} for "
            f"{len(tissues)} tissues; they must fit"
        )
    images = torch.from_numpy(np.array(volumes))
    rows = []
    controls = []
    for channel, tissue in enumerate(tissues):
        share = torch.from_numpy(np.array(regions[:, channel]))
        random = shuffle_tissue_in_brain(share, images[:, 0] > 0, seed + channel)
        rows.append(_route_to_tissue_row(tissue, model, keep_only_tissue(images, share), experts))
        masked = keep_only_tissue(images, random)
        controls.append(_route_to_tissue_row(f"random_{tissue}", model, masked, experts))
    return [*rows, *controls]


def shuffle_tissue_in_brain(share: Tensor, brain: Tensor, seed: int) -> Tensor:
    """Permute each volume's tissue shares (N, D, H, W) among the voxels of the mask ``brain``."""
    # The permutation of the i-th volume depends on the seed and on i alone.
    shuffled = torch.zeros_like(share)
    shuffle_seed = derived_seed("mixed_regions", seed)
    for index, (values, is_brain) in enumerate(zip(share, brain, strict=True)):
        mixed = np.random.default_rng([shuffle_seed, index]).permutation(values[is_brain].numpy())
        shuffled[index][is_brain] = torch.from_numpy(mixed)
    return shuffled


def _route_to_tissue_row(
    name: str, model: Model, volumes: Tensor, experts: Sequence[str]
) -> outcome.TissueRoutingRow:
    _, records = predict.predict_in_batches(model, volumes, batch=32)
    if not records:
        raise UserError("region routing: the model has no MoE layers")
    layout = model.layout
    record = records[-1]
    has_voxels = adaptive_max_pool3d(volumes.float(), layout.grid).flatten(1) > 0  # (N, P)
    if not has_voxels.any() or record.logits.shape[-1] != len(experts):
        raise UserError.at(
            "region routing",
            found=f"{int(has_voxels.sum())} tokens with a voxel, and names of {len(experts)} of "
            f"{record.logits.shape[-1]} experts",
            allowed="at least one token, and a name for each expert",
        )
    scores = record.logits[:, layout.special :][has_voxels].double().mean(dim=0)
    share = record.chosen[:, layout.special :][has_voxels].double().mean(dim=0)
    best = scores.argsort(descending=True, stable=True)[:BEST_EXPERTS_PER_TISSUE].tolist()
    ranked = [(experts[index], float(scores[index])) for index in best]
    shares = dict(zip(experts, share.tolist(), strict=True))
    return outcome.TissueRoutingRow(region=name, experts=ranked, share=shares)
