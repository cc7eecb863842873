"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.data.sources.base import Source
from moecore.data.views.augmentations import ColourJitter as _ColourJitter
from moecore.data.views.augmentations import RandAugment as _RandAugment
from moecore.data.views.random_views import AffineRanges as _AffineRanges
from moecore.data.views.random_views import CropRanges as _CropRanges
from moecore.data.views.random_views import Mix as _Mix
from moecore.data.views.random_views import ViewSettings as _ViewSettings
from moecore.nn.backbones.base_model import Backbone
from moecore.training.settings import Adam as _Adam
from moecore.training.settings import Adamw as _Adamw
from moecore.training.settings import Adversarial as _Adversarial
from moecore.training.settings import Sgd as _Sgd
from moecore.training.settings import Training as _Training
from moecore.training.teachers.base import Teacher as Teacher
from moecore.training.teachers.dense import Dense as _Dense
from moecore.training.teachers.no_teacher import NoTeacher as _NoTeacher
from moecore.training.teachers.open_clip import OpenClip as _OpenClip
from moecore.training.teachers.timm import Timm as _Timm

class Adam(_Adam):
    """Adam without decay (Kingma & Ba 2015)."""

class Adamw(_Adamw):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

class Adversarial(_Adversarial):
    """A PGD attack on the images of every step (Madry et al., 2018; adversarial-moe, §4.2)."""
    steps: int = 10
    """PGD steps per batch; each costs a training step"""
    epsilon: float = 0.03137254901960784
    """radius of the L∞ ball; 0: no attack"""
    form: Literal['paper', 'strong'] = 'paper'
    """as in pgd; strong: random start"""

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

class ColourJitter(_ColourJitter):
    """ColorJitter of torchvision without hue: factors uniform in 1 ± value, in random order."""
    brightness: float = 0.0
    """Blend with black; 0: off"""
    contrast: float = 0.0
    """Blend with the mean grey; 0: off"""
    saturation: float = 0.0
    """Blend with grey, if coloured; 0: off"""

class CropRanges(_CropRanges):
    """Settings of a random crop, which is resized to the view."""
    scale: tuple[float, float] = ...
    """Area of the crop, as a share of the image: lowest, highest"""

class Dense(_Dense):
    """A dense teacher of any depth and width, with the student's patches; one per seed."""
    training: _Training
    data: Source | None = None
    """of data.pretrain's size; null: data.pretrain"""
    model: Backbone

class Mix(_Mix):
    """Mixup and CutMix; with both alphas above 0, a fair coin picks one of the two per image."""
    mixup: float = 0.0
    """alpha of mixup's Beta(alpha, alpha); 0 = off"""
    cutmix: float = 0.0
    """alpha of CutMix's Beta(alpha, alpha); 0 = off"""
    probability: float = 1.0
    """Probability that an image is mixed"""

class NoTeacher(_NoTeacher):
    """No teacher is trained; methods that need one are refused."""
    training: None = None
    data: Source | None = None

class OpenClip(_OpenClip):
    """A CLIP from a checkpoint file, from which a two-tower model starts (``upcycle``)."""
    training: None = None
    data: Source | None = None
    checkpoint: str
    """a .safetensors file such as open_clip_model.safetensors"""
    activation: Literal['gelu', 'quick_gelu'] = 'gelu'
    """quick_gelu: for OpenAI's weights; the file does not tell"""

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

class Sgd(_Sgd):
    """Stochastic gradient descent with momentum, without decay: m ← μm + g, w ← w − rate · m."""
    momentum: float = 0.9
    """μ; 0 for none"""

class Timm(_Timm):
    """A timm model by name, with timm's weights (downloaded) or weights from a file."""
    training: None = None
    data: Source | None = None
    name: str
    """timm's name, such as deit3_small_patch16_224.fb_in22k_ft_in1k"""
    checkpoint: str | None = None
    """.safetensors, timm's names; null: download"""

class Training(_Training):
    """One training run: optimizer, cosine schedule with linear warm-up, augmented views."""
    epochs: int
    batch: int
    """images per step"""
    learning_rate: float
    """peak, after the warm-up"""
    final_learning_rate: float = 1e-06
    """at the end of the cosine"""
    warmup_epochs: float = 1.0
    optimizer: _Adam | _Adamw | _Sgd = ...
    """adamw, adam or sgd"""
    weight_decay: float = ...
    """on matrices; not on biases, norms, tokens and positions; adamw only"""
    clip: float | None = 1.0
    """largest gradient norm; null for none"""
    label_smoothing: float = 0.0
    views: _ViewSettings = ...
    mix: _Mix | None = None
    """mixup and cutmix; null for none"""
    adversarial: _Adversarial | None = None
    """learn from attacked images"""
    updates: int | None = None
    """updates per epoch; null: one pass over the training data"""
    shots: int | None = None
    """drawn training images per class; null: all"""
    shard: int = 1
    """ranks sharing parameters and optimizer; 1: no sharing"""
    expert_parallel: int = 1
    """ranks that share the experts; tokens are sent to them: 1, or shard"""
    precision: Literal['auto', 'float32', 'bfloat16'] = 'auto'
    """auto: bfloat16 where a probe finds it faster"""
    log_every: int = 20
    """steps between two logged points"""
    checkpoint_every: int = 100
    """steps, rounded up to a logged point"""

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
