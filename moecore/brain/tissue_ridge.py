"""Ridge regression of age on tissue volumes, the baseline of brain age, with ComBat for sites.

ComBat: additive and multiplicative site effects, adjusted for age and sex. Feature v of person j at
site i is  y = α_v + x_ij·β_v + γ_iv + δ_iv·ε,  with var ε = σ_v². Least squares over all training
sites gives α, β and σ. Of z = (y − α_v − x·β_v) / σ_v, a site has mean γ̂ and variance δ̂². Both are
shrunk over its features, with γ ~ N(γ̄, τ²) and δ² ~ inverse gamma(λ, θ) fitted by moments, by
iterating
    γ* = (n τ² γ̂ + δ*² γ̄) / (n τ² + δ*²)
    δ*² = (θ + ½ Σ (z − γ*)²) / (n/2 + λ − 1)
until convergence. Sources: Johnson et al. 2007, §3; Fortin et al. 2018. N people, V ≥ 2 features,
P covariates.

Ages must not leak: everything is fitted to the training split. To predict ages, only σ_v γ* is
subtracted, which needs no covariates; scaling by δ* needs the known age. A site that is missing in
training is refused, unless some of its people, with known ages, are declared as its reference and
leave the test. If the ages of two sites barely overlap, no method can separate age from site.
"""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple, Self

import numpy as np

from moecore.brain.age_errors import AgeErrors, measure_age_errors
from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure.calibration import TissueVolumeRidgeSettings

MIN_PEOPLE = 3  # per site, to estimate a variance
TOLERANCE = 1e-8  # change of γ*, and relative change of δ*², at convergence
MAX_ITERATIONS = 1000


class SiteEffect(NamedTuple):
    """Effect of a site on V features: a shift in units of σ (residual SD), and a factor of σ."""

    location: np.ndarray  # γ* (V,)
    scale: np.ndarray  # δ* (V,)


class SiteHarmonisation(NamedTuple):
    """ComBat fitted to the training split, which removes site effects from V features."""

    mean: np.ndarray  # α (V,)
    slopes: np.ndarray  # β (P, V)
    deviation: np.ndarray  # σ (V,)
    effects: dict[str, SiteEffect]  # by site

    @classmethod
    def fit(cls, features: np.ndarray, covariates: np.ndarray, sites: Sequence[str]) -> Self:
        """Fit ComBat to the features (N, V), covariates (N, P) and sites of the training split."""
        names, place, counts = np.unique(sites, return_inverse=True, return_counts=True)
        if len(names) < 2 or "" in names:
            listed = ", ".join(name or "(no name)" for name in names)
            raise UserError(f"harmonise: found the sites {listed}; allowed: 2 or more named sites")
        if few := [name for name, count in zip(names, counts, strict=True) if count < MIN_PEOPLE]:
            raise UserError(
                f"harmonise: found too few training people at {', '.join(few)}; allowed: "
                f"{MIN_PEOPLE} or more per site"
            )
        centre = covariates.mean(axis=0)
        design = np.concatenate([np.eye(len(names))[place], covariates - centre], axis=1)
        fitted = np.linalg.lstsq(design, features, rcond=None)[0]
        at_sites = fitted[: len(names)]
        slopes = fitted[len(names) :]
        grand = counts @ at_sites / len(features)
        deviation = np.sqrt(((features - design @ fitted) ** 2).mean(axis=0))
        blank = cls(grand - centre @ slopes, slopes, deviation, {})
        residuals = blank.standardise(features, covariates)
        effects = {name: shrink_site_effect(residuals[place == i]) for i, name in enumerate(names)}
        return blank._replace(effects=effects)

    def standardise(self, features: np.ndarray, covariates: np.ndarray) -> np.ndarray:
        """Return z = (y − α − x·β) / σ, (N, V), of features y (N, V) and covariates x (N, P)."""
        return (features - self.mean - covariates @ self.slopes) / self.deviation

    def with_site(self, name: str, features: np.ndarray, covariates: np.ndarray) -> Self:
        """Return a copy with the effect of a new site, fitted to features (n, V) of its people."""
        if len(features) < MIN_PEOPLE:
            people = f"{len(features)} people in the reference part of the site {name}"
            raise UserError.at("harmonise", found=people, allowed=f"{MIN_PEOPLE} or more")
        effect = shrink_site_effect(self.standardise(features, covariates))
        return self._replace(effects=self.effects | {name: effect})

    def harmonise(
        self, features: np.ndarray, sites: Sequence[str], covariates: np.ndarray | None = None
    ) -> np.ndarray:
        """Remove additive site effects (N, V): y − σ γ*; with covariates, also multiplicative."""
        # With covariates, also without multiplicative ones: σ (z − γ*) / δ* + α + x·β.
        if missing := sorted(set(sites) - set(self.effects)):
            sites_of_training = ", ".join(sorted(self.effects))
            raise UserError(
                f"harmonise: found no training people at {', '.join(map(repr, missing))}; allowed: "
                f"{sites_of_training}, or a declared reference part of such a site "
                "(tissue_ridge.reference)"
            )
        location = np.stack([self.effects[site].location for site in sites])
        if covariates is None:
            return features - self.deviation * location
        scale = np.stack([self.effects[site].scale for site in sites])
        harmonised = (self.standardise(features, covariates) - location) / scale
        return harmonised * self.deviation + self.mean + covariates @ self.slopes


def shrink_site_effect(residuals: np.ndarray) -> SiteEffect:
    """Estimate shift γ* and factor δ* of a site's z (n, V), shrunk towards means over features."""
    n = len(residuals)
    gamma = residuals.mean(axis=0)
    variance = residuals.var(axis=0, ddof=1)
    gamma_mean = gamma.mean()
    gamma_variance = gamma.var(ddof=1)
    mean = variance.mean()
    spread = variance.var(ddof=1)
    # λ and θ: the inverse gamma distribution with the mean and the variance of δ̂²
    shape = (2 * spread + mean**2) / spread
    rate = (mean * spread + mean**3) / spread
    location, squared = gamma, variance
    for _ in range(MAX_ITERATIONS):
        weight = n * gamma_variance
        new = (weight * gamma + squared * gamma_mean) / (weight + squared)
        new_squared = (rate + ((residuals - new) ** 2).sum(axis=0) / 2) / (n / 2 + shape - 1)
        moved = max(np.abs(new - location).max(), np.abs(new_squared / squared - 1).max())
        location, squared = new, new_squared
        if moved < TOLERANCE:
            break
    return SiteEffect(location, np.sqrt(squared))


PENALTIES = np.logspace(-3, 3, 25)


class RidgeResult(NamedTuple):
    """Errors, in years, of ages that ridge regression predicts from tissue volumes."""

    errors: AgeErrors
    penalty: float  # for standardised features
    n_train: int  # volumes
    n_test: int  # volumes, without reference people
    reference: dict[str, int]  # site → number of people who fit its effect and are not tested
    harmonise: str
    absolute: np.ndarray | None  # |error| of each test volume (N,); None with reference people


class TissueVolumes(NamedTuple):
    features: np.ndarray  # (N, 3): white matter, grey matter, fluid, mL
    ages: np.ndarray  # (N,)
    sexes: list[str]
    sites: list[str]
    people: list[str]

    @property
    def covariates(self) -> np.ndarray:
        """Age in years, and 1 for women, 0 for men, ½ if unknown: (N, 2)."""
        women = [{"F": 1.0, "M": 0.0}.get(sex, 0.5) for sex in self.sexes]
        return np.column_stack([self.ages, women])

    def select(self, chosen: np.ndarray) -> "TissueVolumes":
        columns = [list(compress(names, chosen)) for names in (self.sexes, self.sites, self.people)]
        return TissueVolumes(self.features[chosen], self.ages[chosen], *columns)


def measure_tissue_ridge(data: Prepared, settings: TissueVolumeRidgeSettings) -> RidgeResult:
    # Features are standardised; the leave-one-out error chooses the penalty.
    from sklearn.linear_model import RidgeCV  # slow to import, and it starts a thread
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, test = read_tissue_volumes(data, "train"), read_tissue_volumes(data, "test")
    train_features = train.features
    tested = test
    reference: dict[str, int] = {}
    if settings.harmonise == "combat":
        fitted = SiteHarmonisation.fit(train.features, train.covariates, train.sites)
        if settings.reference:
            in_reference = new_site_reference_mask(test, set(fitted.effects), settings.reference)
            for site in sorted(set(test.select(in_reference).sites)):
                part = test.select(in_reference & (np.array(test.sites) == site))
                fitted = fitted.with_site(site, part.features, part.covariates)
                reference[site] = len(set(part.people))
            tested = test.select(~in_reference)
        if not tested.people:
            reference_size = f"{settings.reference}, which leaves no test volumes"
            raise UserError.at("tissue_ridge.reference", found=reference_size, allowed="a smaller")
        train_features = fitted.harmonise(train.features, train.sites)
        tested = tested._replace(features=fitted.harmonise(tested.features, tested.sites))
    ridge = make_pipeline(StandardScaler(), RidgeCV(PENALTIES)).fit(train_features, train.ages)
    predicted = np.asarray(ridge.predict(tested.features))
    return RidgeResult(
        errors=measure_age_errors(tested.ages, {"ridge": predicted}, tested.people)["ridge"],
        penalty=float(ridge[-1].alpha_),
        n_train=len(train.ages),
        n_test=len(tested.ages),
        reference=reference,
        harmonise=settings.harmonise,
        absolute=None if reference else np.abs(predicted - tested.ages),
    )


def read_tissue_volumes(data: Prepared, split: str) -> TissueVolumes:
    """Return tissue volumes in mL, ages, sexes, sites and participants of a split."""
    millilitres = float(np.prod(data.card["voxel_mm"])) / 1000 / 255
    volumes = [part.sum(axis=(1, 2, 3), dtype=np.int64) for part in data.regions(split)]
    rows = data.subjects(split)
    columns = [[row[name] for row in rows] for name in ("sex", "site", "participant_id")]
    ages = np.asarray(getattr(data, split).labels, np.float64)
    return TissueVolumes(np.stack(volumes) * millilitres, ages, *columns)


def new_site_reference_mask(test: TissueVolumes, trained: set[str], number: int) -> np.ndarray:
    """Mark volumes, (N,) bool, of ``number`` people per new site, used to estimate its effect."""
    # References are the first ``number`` people, by id, of each site without training data.
    chosen = set()
    for site in set(test.sites) - trained:
        pairs = zip(test.people, test.sites, strict=True)
        chosen |= set(sorted({name for name, place in pairs if place == site})[:number])
    return np.array([name in chosen for name in test.people])
