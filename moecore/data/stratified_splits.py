"""Assign images to splits, stratified by class, as a function of the seed alone."""

from typing import ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.tasks.classification import Classification


class SplitSettings(Config):
    """Settings of the sizes of splits, shared by all sources whose images have one class each."""

    task: ClassVar[type[Classification]] = Classification

    seed: int = Field(0, ge=0, description="Seed of the splits and of the limits below")
    validation: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="Share (below 1) or number of training images"
    )
    train_limit: int | None = Field(None, ge=1, description="Images, in proportion to classes")
    test_limit: int | None = Field(None, ge=1, description="Images, in proportion to classes")

    @model_validator(mode="after")
    def _check_validation(self) -> Self:
        if self.validation >= 1 and not float(self.validation).is_integer():
            raise ValueError(f"validation is {self.validation}; allowed: a share < 1 or an integer")
        return self


def stratified_split(
    labels: np.ndarray, amount: float, seed: int, purpose: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``amount`` indices (< 1: a share), by class; return (remaining, drawn), each sorted."""
    # amount: share of N (below 1) or number of images. purpose: makes draws of one seed
    # independent. Every class gives its proportion, at least one image if the amount allows.
    if labels.ndim != 1:
        raise UserError("images with several labels have no split by class; allowed: one label")
    number = round(amount * len(labels)) if amount < 1 else int(amount)
    if not 0 < number < len(labels):
        raise UserError(
            f"cannot split {number} images off {len(labels)}; allowed: 1 to {len(labels) - 1} "
            "(change `validation` or `test`)"
        )
    classes, counts = np.unique(labels, return_counts=True)
    random = np.random.default_rng([seed, purpose])
    drawn_of_class = [
        random.permutation(np.flatnonzero(labels == c))[:take]
        for c, take in zip(classes, class_quotas(counts, number), strict=True)
    ]
    drawn_rows = np.sort(np.concatenate(drawn_of_class))
    return np.setdiff1d(np.arange(len(labels)), drawn_rows), drawn_rows


def class_quotas(counts: np.ndarray, number: int) -> np.ndarray:
    """Distribute ``number`` over classes in proportion to ``counts``, by largest remainder."""
    exact = counts * (number / counts.sum())
    minimum = 1 if number >= len(counts) else 0
    quotas = np.minimum(np.maximum(np.floor(exact).astype(np.int64), minimum), counts)
    while quotas.sum() != number:
        sign = 1 if quotas.sum() < number else -1
        room = quotas < counts if sign > 0 else quotas > minimum
        quotas[np.argmax(np.where(room, sign * (exact - quotas), -np.inf))] += sign
    return quotas


def stratified_limit(labels: np.ndarray, limit: int | None, seed: int) -> np.ndarray:
    """Return sorted indices of at most ``limit`` images (None: all), stratified by class."""
    if limit is None or limit >= len(labels):
        return np.arange(len(labels))
    return stratified_split(labels, limit, seed, purpose=1)[1]


def split_train(labels: np.ndarray, settings: SplitSettings) -> tuple[np.ndarray, np.ndarray]:
    """Split labels (N,) into training, cut to ``train_limit``, and validation: sorted indices."""
    train, validation = stratified_split(labels, settings.validation, settings.seed)
    return train[stratified_limit(labels[train], settings.train_limit, settings.seed)], validation
