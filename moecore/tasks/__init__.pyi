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
    """Classify every cell of a mosaic: softmax cross-entropy and share of right cells."""
    classes: tuple[str, ...]
    """names, in the order of the labels"""
    grid: int
    """cells along each side of a mosaic"""

class Classification(_Classification):
    """Classify images: softmax cross-entropy, and accuracy of the largest logit."""
    classes: tuple[str, ...]
    """names, in the order of the labels"""

class ImageText(_ImageText):
    """Match images and captions by the loss of CLIP (softmax) or of SigLIP (sigmoid)."""
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
    """Predict several classes: sigmoid cross-entropy, precision at 1 (adversarial-moe, eq. 18)."""
    classes: tuple[str, ...]
    """names, in the order of the labels"""

class NextToken(_NextToken):
    """Predict the next word: cross-entropy in nats per token, whose exp is the perplexity."""
    classes: tuple[str, ...] = ...
    """none"""
    words: int
    """of the vocabulary"""

class Regression(_Regression):
    """Predict a number; score: absolute error; loss: absolute error / ``deviation``."""
    classes: tuple[str, ...] = ...
    """none"""
    target: str
    """what the labels are, such as age"""
    unit: str = ''
    """of the labels, such as years"""
    mean: float = 0.0
    """of the training labels: prediction of an untrained head"""
    deviation: float = 1.0
    """of training labels: one unit of the output"""
