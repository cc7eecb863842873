"""Means that a result has, with intervals, and the values per item behind them."""

from collections.abc import Mapping
from typing import Self

import numpy as np

from moecore.core.config import Config
from moecore.measure.base import Estimate
from moecore.statistics.crossed import encode_item_values
from moecore.statistics.intervals import bootstrap_mean


class ItemMeans(Config):
    """Name → mean with its 95 % interval over items, and one number per item, packed."""

    values: dict[str, Estimate]
    items: dict[str, str]  # by ``encode_item_values``

    @classmethod
    def of(
        cls, by_image: Mapping[str, np.ndarray], people: np.ndarray | None, **fields: object
    ) -> Self:
        """Return the means of values (N,) by image, and whatever else the result has.

        people: (N,), whose image each is, or None.
        """
        means = {
            name: Estimate.of(bootstrap_mean(values, lowest=-np.inf, people=people))
            for name, values in by_image.items()
        }
        items = {name: encode_item_values(values, people) for name, values in by_image.items()}
        return cls.model_validate({"values": means, "items": items, **fields})
