"""Profiles of experts on many test images, and pictures with the experts of their patches."""

import base64
import math
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from moecore.core.arrays_as_text import decode_base64_zlib, encode_concatenated_arrays
from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.data.text.tokenizers import Tokenizer
from moecore.data.views.random_views import CropRanges, ViewSettings
from moecore.measure.routing_metrics import interventions, layer_metrics
from moecore.measure.routing_metrics.epoch_routing import true_kinds
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation, draw_two_views
from moecore.nn import correspondence, encoded_routing, predict
from moecore.nn.backbones.base_model import Model
from moecore.nn.backbones.two_towers import CAPTIONS_PER_PASS, TwoTowerModel
from moecore.tasks.base import Task

THUMBNAIL_SIDE = 96  # pixels; larger images are shrunk
CROP_SIDE = 24  # the same for a patch with its surroundings
INTERPOLATION_MODES = {2: "area", 3: "trilinear"}  # by number of axes
CHUNK = 50  # images whose records are in memory at once
MAX_CLASSES = 5  # per expert
CROPS_PER_LAYER = 800  # per layer, shared by its experts
MAX_WORDS = 8  # per expert
MIN_WORD_COUNT = 10  # words that occur less often in the blocks are ignored


class EncodedImages(Config):
    """Images or volumes with one byte per pixel; the last axis is the fastest."""

    shape: tuple[int, ...]  # (N, C, H, W) or (N, C, D, H, W)
    pixels: str  # encoded by ``core.arrays_as_text.encode_concatenated_arrays``

    def array(self) -> np.ndarray:
        return np.frombuffer(decode_base64_zlib(self.pixels), np.uint8).reshape(self.shape)


def encode_thumbnails(pixels: Tensor, side: int = THUMBNAIL_SIDE) -> EncodedImages:
    """Encode pixels in [0, 1], (N, C, *axes), as pictures with no axis above ``side``."""
    size = pixels.shape[2:]
    if max(size) > side:
        small = [max(1, round(length * side / max(size))) for length in size]
        pixels = interpolate(pixels, small, mode=INTERPOLATION_MODES[len(size)])
    data = np.rint(pixels.clamp(0, 1).numpy() * 255).astype(np.uint8)
    return EncodedImages(shape=data.shape, pixels=encode_concatenated_arrays(data))


def crop_patch(image: Tensor, patch: int, layout: TokenLayout) -> Tensor:
    """Crop a patch and half a patch on each side; black outside of the image, (C, h, w)."""
    # image: fp32 (C, H, W), or a volume (C, D, H, W) with axes right, anterior, superior: the axial
    # slice through the patch, anterior up. h and w are twice the patch's.
    position = [int(index) for index in np.unravel_index(patch, layout.grid)]
    sides = [size // patches for size, patches in zip(layout.size, layout.grid, strict=True)]
    if image.ndim == 4:
        image = image[..., position[2] * sides[2] + sides[2] // 2].transpose(1, 2).flip(1)
        position = [layout.grid[1] - 1 - position[1], position[0]]
        sides = [sides[1], sides[0]]
    margins = [side // 2 for side in sides]
    padded = torch.nn.functional.pad(image, (margins[1], margins[1], margins[0], margins[0]))
    top, start = (index * side for index, side in zip(position, sides, strict=True))
    height, width = (side + 2 * margin for side, margin in zip(sides, margins, strict=True))
    return padded[:, top : top + height, start : start + width]


# Stronger crops than in our trainings, so that the picture has patches without a partner.
TWO_CROPS = TwoViewAugmentation(name="crops", views=ViewSettings(crop=CropRanges(scale=(0.3, 0.8))))
MAX_SPECIAL_TOKENS = 2  # before the patches: class token and distillation token


class Overlays(Config):
    """A few images, with the expert of the largest combine weight for each patch."""

    shape: tuple[int, int, int, int]  # (N, C, H, W)
    pixels: str  # base64 of the bytes
    experts: int  # 0 for a dense model
    grids: tuple[tuple[tuple[str, ...], ...], ...]
    """[layer][image]: rows of text, one index a patch, "-" where no expert processed it."""

    def images(self) -> np.ndarray:
        """Return the images, uint8 (N, C, H, W)."""
        return np.frombuffer(base64.b64decode(self.pixels), np.uint8).reshape(self.shape)


class OverlappingCrops(Config):
    """Two random crops of one image; corresponding patches have the same number (PRC, figure 4)."""

    views: EncodedImages  # (2, C, h, w), the crop of higher resolution first
    numbers: tuple[tuple[str, ...], tuple[str, ...]]
    """Rows of text as in Overlays: the index of the patch in the second view, "-": no partner."""


def draw_crop_pair(images: np.ndarray, layout: TokenLayout, seed: int) -> OverlappingCrops | None:
    """Draw two crops per image; return the first pair that shares half of its patches or more."""
    # Without such an image: of the one whose crops share most. images: uint8 (N, C, H, W), N ≥ 1.
    # None for volumes and for images of a single patch.
    if images.ndim != 4 or math.prod(layout.grid) == 1:
        return None
    number = len(images)
    views = draw_two_views(images, TWO_CROPS, seed)
    pairs = correspondence.match_patches(views.affines[:number], views.affines[number:], layout)
    chosen = int(pairs.mask.sum(dim=1).clamp(max=math.prod(layout.grid) // 2).numpy().argmax())
    index = torch.where(pairs.mask[chosen], pairs.index[chosen], -1)
    second = torch.full_like(index, -1)
    second[index[index >= 0]] = index[index >= 0]
    both = views.images[[chosen, number + chosen]]
    if pairs.swapped[chosen]:
        both = both.flip(0)
    grids = (numbers.reshape(layout.grid).numpy() for numbers in (index, second))
    return OverlappingCrops(
        views=encode_thumbnails(both),
        numbers=tuple(tuple(_expert_grid_to_text(grid)) for grid in grids),
    )


def encode_expert_overlays(images: np.ndarray, records: tuple[RoutingRecord, ...]) -> Overlays:
    """Return the images (N, C, H, W) uint8 with each patch's expert of the largest weight."""
    # records: fields (N, T, E), T a square number of patches after at most two other tokens.
    grids = []
    for record in records if len(images) else ():
        tokens = record.combine.shape[1]
        side = math.isqrt(tokens)
        if tokens - side * side > MAX_SPECIAL_TOKENS:
            raise UserError(
                f"routing: {tokens} tokens are no square grid of patches after at most "
                f"{MAX_SPECIAL_TOKENS} other tokens; set routing.overlays to 0"
            )
        best = _best_expert_per_token(record.combine)[:, tokens - side * side :]
        grids.append(best.reshape(-1, side, side).numpy())
    return _encode_overlays(images, records, grids)


def overlay_middle_slices(
    volumes: np.ndarray, records: tuple[RoutingRecord, ...], layout: TokenLayout
) -> Overlays:
    """Return ``encode_expert_overlays`` of middle axial slices, anterior up, right on the right."""
    # volumes: (N, C, D, H, W) in [0, 1], axes right, anterior, superior; records: fields (N, T, E).
    row = layout.grid[2] // 2
    depth = layout.size[2] // layout.grid[2]
    slices = volumes[..., row * depth + depth // 2]
    images = np.rint(np.clip(np.asarray(slices, np.float32), 0, 1) * 255).astype(np.uint8)
    grids = []
    for record in records:
        best = _best_expert_per_token(record.combine[:, layout.special :]).reshape(-1, *layout.grid)
        grids.append(_upright_planes(best[..., row].numpy()))
    return _encode_overlays(_upright_planes(images), records, grids)


def evenly_spaced_overlays(
    images: np.ndarray, records: tuple[RoutingRecord, ...], number: int, layout: TokenLayout
) -> Overlays:
    """Return ``number`` images, evenly spread, with their patches' experts; of volumes, a slice."""
    indices = evenly_spaced_indices(len(images), number) if number else np.array([], int)
    few = tuple(layer.map_tensors(lambda field: field[indices]) for layer in records)
    if images.ndim == 5:
        return overlay_middle_slices(images[indices], few, layout)
    if images.ndim == 3:  # text, with ``number`` 0
        images = images[:, :, None]  # (N, C, 1, M)
    return encode_expert_overlays(images[indices], few)


def _upright_planes(planes: np.ndarray) -> np.ndarray:
    """Turn planes (…, right, anterior) to rows from anterior down, columns from left to right."""
    return np.ascontiguousarray(planes.swapaxes(-1, -2)[..., ::-1, :])


def _encode_overlays(
    images: np.ndarray, records: tuple[RoutingRecord, ...], grids: list[np.ndarray]
) -> Overlays:
    return Overlays(
        shape=images.shape,
        pixels=base64.b64encode(np.ascontiguousarray(images).tobytes()).decode(),
        experts=records[0].combine.shape[-1] if records else 0,
        grids=[[_expert_grid_to_text(grid) for grid in layer] for layer in grids]
        if len(images)
        else [],
    )


def parse_expert_grid(rows: Sequence[str]) -> np.ndarray:
    """Return expert indices (rows, columns) of a grid of ``Overlays``; −1: none processed it."""
    return np.array([[-1 if cell == "-" else int(cell) for cell in row.split()] for row in rows])


def _best_expert_per_token(weights: Tensor) -> Tensor:
    """Return each token's expert of largest weight, (N, T), −1 if all are 0; weights: (N, T, E)."""
    return torch.where(weights.amax(-1) > 0, weights.argmax(-1), -1)


def _expert_grid_to_text(grid: np.ndarray) -> list[str]:
    return [" ".join("-" if cell < 0 else str(cell) for cell in row) for row in grid]


class FavouritePatch(Config):
    image: int  # index in the split
    patch: int  # on the finest grid of all layers, the first that it covers
    probability: float  # of the expert


class ExpertProfile(Config):
    """Load, classes, kinds, words and favourite patches of one expert."""

    load: float  # share of all tokens' choices
    classes: tuple[tuple[int, float], ...]  # class, its share of these choices; largest first
    kinds: tuple[tuple[int, float], ...]  # the same for the tokens' true kinds, if known
    # of a text: words, and the share of their tokens that chose the expert; largest first
    words: tuple[tuple[str, float], ...] = ()
    peak: float  # largest share, over places, of the patches at a place that chose the expert
    favourites: tuple[FavouritePatch, ...]  # highest probability; at most one per image


class LayerGallery(Config):
    """The experts of one MoE layer."""

    experts: tuple[ExpertProfile, ...]
    # (E, 1, *grid) of the finest layer: share of the patches at each place that chose the expert,
    # divided by its peak; None for a text
    places: EncodedImages | None
    crops: EncodedImages | None  # (crops, C, h, w), expert by expert; None without crops


class ExpertUseByImage(NamedTuple):
    """Counts of one layer's expert choices on a few images, and the most probable patches."""

    chosen: Tensor  # (N, E) int64, number of tokens
    highest: Tensor  # (N, E), the largest probability of a patch that chose the expert; −1: none
    patch: Tensor  # (N, E) int64, that patch
    at_place: Tensor  # (1, P, E) int64, images whose patch at this place chose the expert
    of_kind: Tensor  # (1, D, E) int64, tokens of the kind that chose the expert


class GalleryImages(NamedTuple):
    places: np.ndarray  # (N,), indices in the split
    split: Split
    task: Task
    channels: int  # number of the first channels that are shown


def expert_galleries_by_layer(
    model: Model, gallery: GalleryImages, favourites: int
) -> list[LayerGallery]:
    uses: list[list[ExpertUseByImage]] = [[] for _ in model.layouts]  # by layer and chunk
    for start in range(0, len(gallery.places), CHUNK):
        images = np.array(gallery.split.images[gallery.places[start : start + CHUNK]])
        _, records = predict.predict_in_batches(model, images, CHUNK, prediction=False)
        for chunks, record, layout in zip(uses, records, model.layouts, strict=True):
            kinds = one_hot_kinds(images, layout, model.image.truth)
            chunks.append(count_expert_use(record, layout.special, kinds))
    fine = encoded_routing.finest_layout(model.layouts)
    layers = []
    for chunks, layout in zip(uses, model.layouts, strict=True):
        use = ExpertUseByImage(*map(torch.cat, zip(*chunks, strict=True)))
        layers.append(_profile_experts(use, gallery, layout, fine, favourites))
    return layers


def one_hot_kinds(images: np.ndarray, layout: TokenLayout, kinds: int) -> Tensor:
    """Return whether each token is of each kind, (N, T, D) bool; D = 0 without known kinds."""
    if not kinds:
        return torch.zeros(len(images), layout.special + prod(layout.grid), 0, dtype=torch.bool)
    return true_kinds(torch.from_numpy(images), layout)[..., None] == torch.arange(1, kinds + 1)


def count_expert_use(record: RoutingRecord, special: int, kinds: Tensor) -> ExpertUseByImage:
    """Count, per image, each expert's tokens; find its patch of highest routing probability."""
    # special: number of tokens before the patches; kinds: (N, T, D) bool, each token's true kind.
    highest, patch = torch.where(record.chosen, record.probs, -1.0)[:, special:].max(dim=1)
    counts = torch.stack([layer_metrics.expert_counts(image) for image in record.chosen])
    at_place = record.chosen[:, special:].sum(dim=0, keepdim=True)
    of_kind = (kinds.double().mT @ record.chosen.double()).sum(dim=0, keepdim=True).long()
    return ExpertUseByImage(counts, highest, patch, at_place, of_kind)


def _profile_experts(
    use: ExpertUseByImage,
    gallery: GalleryImages,
    layout: TokenLayout,
    fine: TokenLayout,
    max_favourites: int,
) -> LayerGallery:
    labels = torch.from_numpy(np.array(gallery.split.labels[gallery.places]))
    covering = encoded_routing.coarse_patch_indices(layout, fine)
    places = (use.at_place.sum(dim=0)[covering] / len(labels)).T.unflatten(1, (1, *fine.grid))
    counts = use.chosen.sum(dim=0)
    shares = None
    if members := gallery.task.by_class(labels):
        rows, classes = members  # an image of several classes counts for each of them
        shares = torch.zeros(gallery.task.outputs, len(counts), dtype=torch.float64)
        shares.index_add_(0, classes.long(), use.chosen[rows].double())
        shares = (shares / shares.sum(dim=0).clamp(min=1)).T
    kinds = use.of_kind.sum(dim=0).double().T
    kinds /= kinds.sum(dim=1, keepdim=True).clamp(min=1)
    peaks = places.flatten(1).amax(dim=1)
    number = len(counts)
    max_favourites = max(1, min(max_favourites, CROPS_PER_LAYER // number))
    experts = []
    crops = []
    for expert in range(number):
        ordered = use.highest[:, expert].sort(descending=True, stable=True)
        best = zip(*(field[:max_favourites].tolist() for field in ordered), strict=True)
        favourites = []
        for probability, row in best:
            if probability < 0:
                break
            image = int(gallery.places[row])
            patch = int(use.patch[row, expert])
            (pixels,) = predict.image_batches(gallery.split.images[image][None], 1)
            crops.append(crop_patch(pixels[0, : gallery.channels], patch, layout))
            first = int((covering == patch).nonzero()[0])
            probability = round(probability, 4)
            favourites.append(FavouritePatch(image=image, patch=first, probability=probability))
        experts.append(
            ExpertProfile(
                load=round(float(counts[expert] / counts.sum().clamp(min=1)), 5),
                classes=() if shares is None else largest_shares(shares[expert]),
                kinds=[(index + 1, share) for index, share in largest_shares(kinds[expert])],
                peak=round(float(peaks[expert]), 4),
                favourites=favourites,
            )
        )
    relative = places / peaks.clamp(min=1e-9).view(-1, *[1] * (places.ndim - 1))
    return LayerGallery(
        experts=experts,
        places=encode_thumbnails(relative),
        crops=encode_thumbnails(torch.stack(crops), CROP_SIDE) if crops else None,
    )


def largest_shares(shares: Tensor, number: int = MAX_CLASSES) -> tuple[tuple[int, float], ...]:
    order = shares.sort(descending=True, stable=True).indices[:number].tolist()
    return tuple((index, round(float(shares[index]), 4)) for index in order if shares[index] > 0)


def select_last_context_word_ids(blocks: np.ndarray, has_truth: bool) -> np.ndarray:
    """Return word ids (N, T) of the last text block; has_truth: half of blocks are true kinds."""
    # blocks: (N, C, T), C blocks of context; if ``has_truth``, C / 2, then C / 2 of true kinds.
    return blocks[:, blocks.shape[1] // (1 + has_truth) - 1].astype(np.int64)


def word_galleries_by_layer(
    model: Model, blocks: np.ndarray, vocabulary: Sequence[str]
) -> list[LayerGallery]:
    """Return every MoE layer's profiles of experts on N texts of C blocks of T words, (N, C, T)."""
    _, records = predict.predict_in_batches(model, blocks, CHUNK, prediction=False)
    word_ids = select_last_context_word_ids(blocks, bool(model.image.truth))
    galleries = []
    for record, layout in zip(records, model.layouts, strict=True):
        chosen = record.chosen
        loads = layer_metrics.expert_counts(chosen).double()
        loads /= loads.sum().clamp(min=1)
        of_kind = one_hot_kinds(blocks, layout, model.image.truth).double().flatten(0, 1)
        kinds = chosen.double().flatten(0, 1).T @ of_kind
        kinds /= kinds.sum(dim=1, keepdim=True).clamp(min=1)
        experts = [
            ExpertProfile(
                load=round(float(load), 5),
                classes=(),
                kinds=[(index + 1, share) for index, share in largest_shares(kind_shares)],
                words=[(vocabulary[word], share) for word, share in favourites],
                peak=0,
                favourites=(),
            )
            for load, kind_shares, favourites in zip(
                loads, kinds, favourite_words(word_ids, chosen.numpy()), strict=True
            )
        ]
        galleries.append(LayerGallery(experts=experts, places=None, crops=None))
    return galleries


def favourite_words(
    word_ids: np.ndarray, chosen: np.ndarray, rare: int = MIN_WORD_COUNT
) -> list[list[tuple[int, float]]]:
    """Return, per expert, the words whose tokens chose it most often, with these shares."""
    # word_ids: (N, T); chosen: (N, T, E) bool. Words with fewer than ``rare`` tokens are ignored.
    vocabulary, inverse, counts = np.unique(word_ids, return_inverse=True, return_counts=True)
    uses = np.zeros((len(vocabulary), chosen.shape[-1]))
    np.add.at(uses, inverse.ravel(), chosen.reshape(-1, chosen.shape[-1]))
    is_common = counts >= rare
    common = vocabulary[is_common]
    shares = torch.from_numpy(uses[is_common] / counts[is_common, None])
    largest = [largest_shares(expert_shares, MAX_WORDS) for expert_shares in shares.T]
    return [[(int(common[row]), share) for row, share in pairs] for pairs in largest]


Read = list[tuple[str, list[int]]]  # words with their experts, largest weight first


def find_two_tower_model(model: Model) -> TwoTowerModel | None:
    student = interventions.unguided_model(model)
    return student if isinstance(student, TwoTowerModel) else None


@torch.no_grad()
def words_with_experts(
    model: TwoTowerModel, tokens: Tensor, tokenizer: Tokenizer, max_experts: int = 2
) -> list[list[Read]]:
    """Return [caption][MoE layer]: words with ``max_experts`` best experts each; tokens (n, M)."""
    captions_read: list[list[Read]] = []
    with predict.eval_mode(model):
        for part in tokens.split(CAPTIONS_PER_PASS):
            _, records = model.text(part.to(model.logit_scale.device))
            masks = model.text.caption_mask(part)
            layers = [experts_by_weight(record.combine[0].cpu(), max_experts) for record in records]
            first = 0
            for row, mask in zip(part, masks, strict=True):
                caption = [tokenizer.word(token) for token in row[mask].tolist()]
                last = first + len(caption)
                read = [list(zip(caption, layer[first:last], strict=True)) for layer in layers]
                captions_read.append(read)
                first = last
    return captions_read


def experts_by_weight(combine: Tensor, max_experts: int) -> list[list[int]]:
    """Return, per row of weights (n, E), the experts with nonzero weight, largest first."""
    weights, order = combine.topk(min(max_experts, combine.shape[-1]))
    return [
        [expert for expert, weight in zip(*row, strict=True) if weight > 0]
        for row in zip(order.tolist(), weights.tolist(), strict=True)
    ]
