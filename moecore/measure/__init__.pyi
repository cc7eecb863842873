"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.attacks.base import Attack
from moecore.attacks.surrogate import RouterAttacks as _RouterAttacks
from moecore.data.sources.cifar import Cifar
from moecore.data.sources.digits import Digits
from moecore.data.sources.fashion_mnist import FashionMnist
from moecore.data.sources.image_folder import ImageFolder
from moecore.data.sources.imagenet import Imagenet
from moecore.data.views.augmentations import ColourJitter as _ColourJitter
from moecore.data.views.augmentations import RandAugment as _RandAugment
from moecore.data.views.random_views import AffineRanges as _AffineRanges
from moecore.data.views.random_views import CropRanges as _CropRanges
from moecore.data.views.random_views import ViewSettings as _ViewSettings
from moecore.measure.attack_audit import AuditSettings as _AuditSettings
from moecore.measure.base import Measurement as Measurement
from moecore.measure.cohort_checks import CohortChecks as _CohortChecks
from moecore.measure.corruptions import Corruptions as _Corruptions
from moecore.measure.cost import Cost as _Cost
from moecore.measure.expert_worth import ExpertWorth as _ExpertWorth
from moecore.measure.explorer import Explorer as _Explorer
from moecore.measure.few_shot import FewShot as _FewShot
from moecore.measure.fewer_experts import FewerExperts as _FewerExperts
from moecore.measure.invariance import Invariance as _Invariance
from moecore.measure.lipschitz import Lipschitz as _Lipschitz
from moecore.measure.probes.simulated_people import RegionGeneralisationSettings as _RegionGeneralisationSettings
from moecore.measure.retrieval import Retrieval as _Retrieval
from moecore.measure.robustness import Robustness as _Robustness
from moecore.measure.router_regret import RouterRegret as _RouterRegret
from moecore.measure.routing import Routing as _Routing
from moecore.measure.routing_certificate import RoutingCertificate as _RoutingCertificate
from moecore.measure.routing_metrics.expert_roles import ExpertRoles as _ExpertRoles
from moecore.measure.routing_metrics.interventions import SweepSettings as _SweepSettings
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation as _TwoViewAugmentation
from moecore.measure.smoothing import Smoothing as _Smoothing
from moecore.measure.stability import Stability as _Stability
from moecore.measure.truth import Truth as _Truth
from moecore.measure.word_swaps import WordSwaps as _WordSwaps
from moecore.measure.zero_shot import ZeroShot as _ZeroShot

class AffineRanges(_AffineRanges):
    """Limits of a random affine about the centre: scale and shear, rotation, translation."""
    degrees: float = 0.0
    """Largest rotation; of volumes: per axis"""
    translate: float = 0.0
    """Largest shift per axis, share of a side"""
    scale: tuple[float, float] = ...
    """Scaling factor of all sides: lowest, highest"""
    shear: float = 0.0
    """± degrees along the columns; images only"""

class AuditSettings(_AuditSettings):
    """Settings of PGD from clean images on the task's loss, which audits the listed attacks."""
    images: int = 200
    """The first of the attacked images, at most."""
    steps: int = 20
    """Steps of PGD; one line doubles them."""

class CohortChecks(_CohortChecks):
    """Checks of a model of age on single tissues, simulated ageing, rescans and region experts."""
    subjects: int = 8
    """Simulated subjects that are aged."""
    ages: tuple[float, ...] = ...
    """Ages in years, ascending."""
    rescans: int = 16
    """Subjects scanned again, at one site and at two."""
    probe: int = 256
    """Most training volumes that a probe is fitted to."""
    generalisation: _RegionGeneralisationSettings = ...
    """Tests of region experts on volumes that differ from training."""
    batch: int = 16
    """Volumes per pass; results do not depend on it."""

class ColourJitter(_ColourJitter):
    """ColorJitter of torchvision without hue: factors uniform in 1 ± value, in random order."""
    brightness: float = 0.0
    """Blend with black; 0: off"""
    contrast: float = 0.0
    """Blend with the mean grey; 0: off"""
    saturation: float = 0.0
    """Blend with grey, if coloured; 0: off"""

class Corruptions(_Corruptions):
    """Error of a model on corrupted test images."""
    images: int | None = 300
    """Test images, evenly spread, the same for every method; null: all."""
    severities: tuple[int, ...] = ...
    """1 to 5; a corruption's error is the mean over them."""
    names: tuple[Literal['gaussian_noise', 'shot_noise', 'impulse_noise', 'defocus_blur', 'glass_blur', 'motion_blur', 'zoom_blur', 'snow', 'frost', 'fog', 'brightness', 'contrast', 'elastic_transform', 'pixelate', 'jpeg_compression'], ...] | None = None
    """Null: all fifteen."""

class Cost(_Cost):
    """Counts and timings of forward passes; timings are of this machine and vary between runs."""
    batch: int = 64
    """For throughput and peak memory; latency: one image."""
    rounds: int = 10
    """Timed passes, after three warm-up passes."""
    images: int = 64
    """Test images that the passes use in turn."""

class CropRanges(_CropRanges):
    """Settings of a random crop, which is resized to the view."""
    scale: tuple[float, float] = ...
    """Area of the crop, as a share of the image: lowest, highest"""

class ExpertRoles(_ExpertRoles):
    """Settings and metrics of experts' roles: which tokens choose an expert, and with which others.

    information_{label}: mutual information of expert and label above that of permuted labels, over
    the label's entropy. pair_lift: mean P(b | a) / P(b) of chosen pairs; chance: at an even load.
    margin: lowest chosen − highest other score. consistency: F1 of one set of experts for a window
    of tokens. early_*: choices foretold from the layer before. batch_violation: MaxVio of batches."""
    batch: int = 64
    """Images per batch for MaxVio of a batch."""
    windows: tuple[int, ...] = ...
    """Sizes of windows of neighbouring tokens, below the sequence length."""

class ExpertWorth(_ExpertWorth):
    """Drop in score without one expert, or the most or least used (on validation) of each layer."""
    images: int | None = 500
    """Test images, evenly spread; null: all."""
    batch: int = 256
    """Images per forward pass."""
    draws: int = 5
    """Random draws of removed experts, for comparison."""

class Explorer(_Explorer):
    """Routing of single images, clean and perturbed, for the routing explorer."""
    images: int = 24
    """Test images, evenly spread over the split, the same for every method; at most 6 volumes."""
    gallery: int | None = 400
    """Images of favourite patches; null: all."""
    epsilons: tuple[float, ...] = ...
    """Radii of the L∞ ball, pixels in [0, 1]."""
    attack: Attack = ...
    """The attack at these radii."""
    augmentations: tuple[Literal['identity', 'noise', 'shift', 'flip', 'crop', 'rotation', 'affine', 'brightness', 'contrast', 'randaugment', 'erasing'] | _TwoViewAugmentation, ...] = ...
    """Random views, by kind: presets, or {name, views, noise}; not used for images with a channel
    of truth, which a view would falsify."""

class FewShot(_FewShot):
    """Few-shot accuracy of ridge regression on the model's features."""
    shots: tuple[int, ...] = ...
    """Training images per class; numbers above the smallest class are skipped."""
    draws: int = 5
    """Random draws of images, the same for every method."""

class FewerExperts(_FewerExperts):
    """Score of the model with a share of its experts left, by pruning and by merging."""
    left: tuple[float, ...] = ...
    """Shares of a layer's experts, rounded up."""
    ways: tuple[Literal['reap', 'load', 'merge'], ...] = ...
    """reap, load: pruned by that score; merge: clustered by mean outputs."""
    calibration: int = 1000
    """Evenly spread training images for scores."""
    images: int | None = None
    """Test images, evenly spread; null: all."""

class Invariance(_Invariance):
    """Distance and agreement of routing between images and their transformed versions."""
    images: int | None = 2000
    """Test images, evenly spread; null: all."""
    batch: int = 256
    """Images per pass; results do not depend on it."""

class Lipschitz(_Lipschitz):
    """Slopes of logits; check of Lemma 1's bound on MoE layers' slopes (Puigcerver et al. 2022)."""
    images: int = 100
    """Test images, evenly spread."""
    lemma_tokens: int = 64
    """Their tokens for Lemma 1, per MoE layer."""

class RandAugment(_RandAugment):
    """RandAugment's settings: number of random operations per image, and their strength.

    At magnitude 10: shear 0.3, translation 45 % of the side, rotation 30°, enhancement factors 1 ±
    0.9, 4 bits, threshold 0; other magnitudes in proportion. Signs are random. Geometric operations
    are about the image's centre and come before all colours (our choice)."""
    operations: int = 2
    """Operations per image, with replacement"""
    magnitude: float = 9
    """Strength; 10: the full range of each"""
    names: tuple[Literal['shear_x', 'shear_y', 'translate_x', 'translate_y', 'rotate'] | Literal['identity', 'autocontrast', 'equalize', 'brightness', 'contrast', 'saturation', 'sharpness', 'posterize', 'solarize', 'invert'], ...] = ...
    """Operations to draw from; all but invert by default"""

class RegionGeneralisationSettings(_RegionGeneralisationSettings):
    """Volumes that differ from training, on which region experts are tested."""
    volumes: int = 48
    """Most test participants, one volume each."""
    subjects: int = 24
    """Subjects of another volume generator."""

class Retrieval(_Retrieval):
    """Recall of images by captions and captions by images, and the routing of words."""
    images: int | None = None
    """Gallery: the first test images; null: all."""
    at: tuple[int, ...] = ...
    """k of R@k."""

class Robustness(_Robustness):
    """Scores and routing under attacks within L∞ balls around the images."""
    images: int = 512
    """Test images, drawn once for every method."""
    epsilons: tuple[float, ...]
    """Radii of the L∞ ball in pixel units [0, 1]; 0 is added. An attack's eps replaces them for
    that attack."""
    attacks: tuple[Attack, ...]
    routers: _RouterAttacks | None = None
    """On the routers, too; null: none."""
    transfer: Attack | None = None
    """Attack on the dense model and on the next seed's, by the stage transferred, whose images this
    model gets; null: none."""
    batch: int = 128
    """Images per pass, rounded to groups of a capacity."""
    precision: Literal['float32', 'bfloat16'] = 'float32'
    """Of the attack's passes; scores: float32."""
    survivors: bool = False
    """Attack only right images; no routing change."""
    audit: _AuditSettings = ...
    """Attacks that check the others."""

class RouterAttacks(_RouterAttacks):
    """Settings of several attacks with APGD that use the routers; all of them run.

    Per temperature, ``surrogate`` without and with ``direct``. Per weight, APGD on task loss +
    weight · routing margin (logit of a token's next expert − its k-th). Once, APGD on that margin."""
    steps: int = 50
    """Steps of APGD in each form."""
    temperatures: tuple[float | Literal['probs'], ...] = ...
    """Of a soft choice, as in the attack surrogate."""
    weights: tuple[float, ...] = ...
    """Margin against task loss."""
    inside: bool = False
    """Change only pixels that are not 0."""

class RouterRegret(_RouterRegret):
    """Regret of the router: loss of drawn tokens under other sets of experts."""
    images: int | None = 32
    """Test images, evenly spread; null: all."""
    tokens: int = 8
    """Random tokens per image, the same for every method."""
    batch: int = 256
    """Forward passes per batch."""
    explored: int = 8
    """Explorer's images whose best experts are stored."""

class Routing(_Routing):
    """Routing metrics on test images, also under augmentations and other router settings."""
    images: int = 2000
    """Test images, evenly spread; same for all methods."""
    batch: int = 256
    """Images per pass; results do not depend on it."""
    overlays: int = 4
    """Images shown with their patches' experts."""
    views: _ViewSettings = ...
    """Two compared views (PRC, table 4)."""
    augmentations: tuple[Literal['identity', 'noise', 'shift', 'flip', 'crop', 'rotation', 'affine', 'brightness', 'contrast', 'randaugment', 'erasing'] | _TwoViewAugmentation, ...] = ...
    """Each compared like views: presets, or {name, views, noise}."""
    augmentation_images: int = 200
    """Images compared per augmentation."""
    sweeps: _SweepSettings = ...
    """Other k and T (ERMoE, S3, S5)."""
    roles: _ExpertRoles | None = None
    """Experts' roles, same pass; null: none."""

class RoutingCertificate(_RoutingCertificate):
    """Radii around images within which no change of the pixels changes a token's experts."""
    images: int = 100
    """Test images, evenly spread; the same for every method."""
    epsilons: tuple[float, ...] = ...
    """Radii, of pixels in [0, 1], at which certified tokens are counted."""
    attacked: int = 64
    """Tokens per norm that an attack checks."""
    steps: int = 20
    """Steps of this attack on a router's margin."""

class Smoothing(_Smoothing):
    """Certified accuracy of the model smoothed by Gaussian noise on the pixels."""
    images: int = 100
    """Test images, evenly spread."""
    sigma: float = 0.25
    """σ of the noise, of pixels in [0, 1]."""
    guesses: int = 100
    """Draws per image that choose its class (n₀)."""
    draws: int = 400
    """Draws per image that certify this class (n)."""
    alpha: float = 0.001
    """Probability of a wrong certificate (α)."""
    radii: tuple[float, ...] = ...
    """ℓ2 radii of the curve, of pixels in [0, 1]."""

class Stability(_Stability):
    """Score and routing under noise, and jumps of the prediction along a ramp of noise."""
    images: int | None = 100
    """Test images, evenly spread; null: all."""
    overlays: int = 4
    """Images shown with their experts and ramps."""
    sigmas: tuple[float, ...] = ...
    """σ of noise in [0, 1]."""
    steps: int = 40
    """Equal steps of the ramp."""

class SweepSettings(_SweepSettings):
    """Settings of the router that are tried on the trained weights; nothing is selected by them."""
    k: tuple[int, ...] = ...
    """Experts per token; skipped above the number"""
    threshold: tuple[float, ...] = ...
    """Thresholds (of a cosine); routers without a threshold have no such sweep"""
    images: int = 300
    """How many of the measured images are used"""

class Truth(_Truth):
    """Agreement of each token's first expert with the token's true kind."""
    images: int | None = None
    """Evenly spread; null: all of them."""

class TwoViewAugmentation(_TwoViewAugmentation):
    """An augmentation, applied twice with independent draws; the default changes nothing."""
    name: str
    """Its name in tables; the draws depend on it"""
    views: _ViewSettings = ...
    """Geometry and colours of each view"""
    noise: float = 0.0
    """Gaussian σ, added last; pixels in [0, 1]"""

class ViewSettings(_ViewSettings):
    """Settings of random views: shift, crop, flip, affine, RandAugment, colours, erasing.

    They are applied in this order (colours: RandAugment's, then jitter); the default changes
    nothing. All geometry is one affine and one linear sampling; shifts and flips alone keep every
    pixel exact. Volumes take shift, flip (of their first axis, which runs from left to right),
    affine without shear, and fill."""
    shift: int = 0
    """Largest movement per axis in pixels (pad and crop)"""
    crop: _CropRanges | None = None
    """Random resized crop"""
    flip: bool = False
    """Mirror left and right with probability one half"""
    affine: _AffineRanges | None = None
    """Random affine"""
    randaugment: _RandAugment | None = None
    """RandAugment: number of operations, magnitude; null: off"""
    jitter: _ColourJitter | None = None
    """Random brightness, contrast and saturation"""
    erasing: float = 0.0
    """Probability; black 2 to 33 % of the view"""
    fill: Literal['zeros', 'border', 'reflection'] = 'zeros'
    """Outside the image: black, the nearest pixel, the mirrored image"""

class WordSwaps(_WordSwaps):
    """Loss and routing of a text in which words are replaced by ``<unk>``."""
    images: int | None = None
    """Blocks of the test text; null: all."""
    shares: tuple[float, ...] = ...
    """Swapped for <unk>."""

class ZeroShot(_ZeroShot):
    """Zero-shot classification of another data set's test images."""
    source: FashionMnist | Digits | ImageFolder | Cifar | Imagenet
    """data set whose test split is used, resized for the model"""
    templates: tuple[str, ...] = ...
    """prompts; {} is a class's name"""
    names: tuple[str, ...] | None = None
    """names of the classes, in the source's order; null: the source's names"""
    images: int | None = None
    """Test images, evenly spread; null: all."""
