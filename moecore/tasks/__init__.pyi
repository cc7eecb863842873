"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.tasks.base import Task as Task
from moecore.tasks.cells import Cells as _Cells
from moecore.tasks.classification import Classification as _Classification
from moecore.tasks.image_text import ImageText as _ImageText
from moecore.tasks.multi_label import MultiLabel as _MultiLabel
from moecore.tasks.next_token import NextToken as _NextToken
from moecore.tasks.regression import Regression as _Regression

class Cells(_Cells):
    """Softmax cross-entropy, and the share of right cells; both are means over cells."""
    classes: tuple[str, ...]
    """names, in the order of the labels"""
    grid: int
    """cells along each side of a mosaic"""

class Classification(_Classification):
    """Softmax cross-entropy, and the share of images whose largest logit is the label's."""
    classes: tuple[str, ...]
    """names, in the order of the labels"""

class ImageText(_ImageText):
    """Symmetric cross-entropy (CLIP; Radford et al. 2021) or sigmoid (SigLIP; Zhai et al. 2023)."""
    classes: tuple[str, ...] = ...
    """none"""
    words: int
    """of the vocabulary"""
    context: int
    """tokens per caption, M"""
    captions: int
    """largest number of captions per image, C"""
    end: int
    """the token that ends a caption"""
    vocabulary: str
    """sha256 of the vocabulary"""
    sided: bool = False
    """captions say left or right: no view mirrors an image"""
    width: int = 1
    """of the joint space, d; set by the model"""
    pairs: Literal['softmax', 'sigmoid'] = 'softmax'
    """loss; set by the model"""

class MultiLabel(_MultiLabel):
    """Sigmoid cross-entropy, summed over classes; precision at 1 (adversarial-moe, eq. 18)."""
    classes: tuple[str, ...]
    """names, in the order of the labels"""

class NextToken(_NextToken):
    """Softmax cross-entropy in nats per token; its exponential is the perplexity."""
    classes: tuple[str, ...] = ...
    """none"""
    words: int
    """of the vocabulary"""

class Regression(_Regression):
    """The mean absolute error: learned in deviations of the labels, shown in their unit."""
    classes: tuple[str, ...] = ...
    """none"""
    target: str
    """what the labels are, such as age"""
    unit: str = ''
    """of the labels, such as years"""
    mean: float = 0.0
    """of the training labels: what an untrained head says"""
    deviation: float = 1.0
    """of training labels: one unit of the output"""
