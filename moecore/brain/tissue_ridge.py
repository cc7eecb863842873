"""The baseline that knows three numbers of a brain: ridge regression on its tissue volumes.

N volumes of a split; white matter, grey matter and fluid in mL. Its penalty is chosen by
leave-one-out error on the training split.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydantic import Field

from moecore.brain.age_errors import AgeErrors, measure_age_errors
from moecore.brain.tissue_ridge import SiteHarmonisation
from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure.calibration import TissueRidge
from moecore.statistics.crossed import encode_item_values

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

PENALTIES = np.logspace(-3, 3, 25)


class RidgeResult(Config):
    """How well tissue volumes alone tell age, in years."""

    errors: AgeErrors
    penalty: float = Field(description="of features and ages in their deviations")
    n_train: int = Field(description="volumes")
    n_test: int = Field(description="volumes, without those of reference parts")
    reference: dict[str, int] = Field(
        description="site → its participants that harmonisation used, who are not in the error"
    )
    harmonise: str
    items: str | None = Field(
        description="|error| of one number a person, where all of the test are in it"
    )


class SplitFeatures(NamedTuple):
    """What is known of the volumes of a split: features (N, 3) mL, ages (N,), and who they are."""

    features: np.ndarray
    ages: np.ndarray
    sexes: list[str]
    sites: list[str]
    people: list[str]

    @property
    def covariates(self) -> np.ndarray:
        """Age, and 1 for women, ½ where the sex is unknown: (N, 2)."""
        women = [{"F": 1.0, "M": 0.0}.get(sex, 0.5) for sex in self.sexes]
        return np.column_stack([self.ages, women])

    def select(self, chosen: np.ndarray) -> "SplitFeatures":
        """Return the volumes of which ``chosen`` (N,) bool is true."""
        words = [
            [one for one, there in zip(column, chosen, strict=True) if there]
            for column in (self.sexes, self.sites, self.people)
        ]
        return SplitFeatures(self.features[chosen], self.ages[chosen], *words)


def measure_tissue_ridge(data: Prepared, settings: TissueRidge) -> RidgeResult:
    """Fit to the training split, and return the errors on the test split.

    Raises UserError for data without tissue maps, for sites that cannot be harmonised, and where
    reference parts leave no test.
    """
    train, test = read_split_features(data, "train"), read_split_features(data, "test")
    learned, said_of = train.features, test
    reference: dict[str, int] = {}
    if settings.harmonise == "combat":
        fitted = SiteHarmonisation.fit(train.features, train.covariates, train.sites)
        if settings.reference:
            in_reference = new_site_reference_mask(test, set(fitted.effects), settings.reference)
            for site in sorted(set(test.select(in_reference).sites)):
                part = test.select(in_reference & (np.array(test.sites) == site))
                fitted = fitted.with_site(site, part.features, part.covariates)
                reference[site] = len(set(part.people))
            said_of = test.select(~in_reference)
        if not said_of.people:
            raise UserError(
                f"tissue_ridge.reference: found {settings.reference}, which leaves nobody for the "
                "test; allowed: less"
            )
        learned = fitted.harmonise(train.features, train.sites)
        said_of = said_of._replace(features=fitted.harmonise(said_of.features, said_of.sites))
    ridge = fit_ridge(learned, train.ages)
    said = np.asarray(ridge.predict(said_of.features))
    people = np.unique(said_of.people, return_inverse=True)[1]
    items = None if reference else encode_item_values(np.abs(said - said_of.ages), people)
    return RidgeResult(
        errors=measure_age_errors(said_of.ages, {"ridge": said}, said_of.people)["ridge"],
        penalty=float(ridge[-1].alpha_),
        n_train=len(train.ages),
        n_test=len(said_of.ages),
        reference=reference,
        harmonise=settings.harmonise,
        items=items,
    )


def fit_ridge(features: np.ndarray, ages: np.ndarray) -> "Pipeline":
    """Return ridge regression of ages (N,) on standardised features (N, F)."""
    from sklearn.linear_model import RidgeCV  # slow to import, and it starts a thread
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV(PENALTIES)).fit(features, ages)


def read_split_features(data: Prepared, split: str) -> SplitFeatures:
    """Return the volumes of each tissue, in mL, and ages, sexes, sites and ids of a split."""
    millilitres = float(np.prod(data.card["voxel_mm"])) / 1000 / 255
    volumes = [part.sum(axis=(1, 2, 3), dtype=np.int64) for part in data.regions(split)]
    rows = data.subjects(split)
    words = [[row[name] for row in rows] for name in ("sex", "site", "participant_id")]
    ages = np.asarray(getattr(data, split).labels, np.float64)
    return SplitFeatures(np.stack(volumes) * millilitres, ages, *words)


def new_site_reference_mask(test: SplitFeatures, known: set[str], number: int) -> np.ndarray:
    """Return which volumes (N,) are of the first ``number`` participants, in the order of their
    ids, of each site that training lacks.
    """
    chosen = set()
    for site in set(test.sites) - known:
        own = {who for who, place in zip(test.people, test.sites, strict=True) if place == site}
        chosen |= set(sorted(own)[:number])
    return np.array([who in chosen for who in test.people])
