"""The baseline that knows three numbers of a brain, and ComBat for the sites that they come from.

Ridge regression on tissue volumes: white matter, grey matter and fluid in mL, of N volumes of a
split. The penalty is chosen by leave-one-out error on the training split.

ComBat: additive and multiplicative site effects, adjusted for age and sex. Feature v of person j at
site i:  y = α_v + x_ij·β_v + γ_iv + δ_iv·ε,  ε of variance σ_v². α, β and σ are fitted to all sites
of the training part by least squares; with z = (y − α_v − x·β_v) / σ_v a site has γ̂ = mean z and
δ̂² = var z, which are shrunk over its features (γ ~ N(γ̄, τ²), δ² ~ inverse gamma(λ, θ), by moments),
until nothing changes:
    γ* = (n τ² γ̂ + δ*² γ̄) / (n τ² + δ*²)
    δ*² = (θ + ½ Σ (z − γ*)²) / (n/2 + λ − 1)
Sources: Johnson et al. 2007, §3; Fortin et al. 2018. N people, V ≥ 2 features, P covariates.

What is legitimate: everything is fitted to the training part alone. Without covariates only
y − σ_v γ* is taken, so that no age is needed of whom a model predicts the age of. δ* takes it
(y − x·β is what is stretched): for features of people whose age is known, never to predict it. A
site that the training part lacks is refused, unless a part of it, with known ages, is declared as
its reference: that part is then no test. Where ages of two sites hardly overlap, β cannot tell age
from site, and nothing here can.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moecore.brain.age_errors import AgeErrors, measure_age_errors
from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure.calibration import TissueRidge

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline


FEWEST = 3  # people of a site, of whom a variance is worth anything
SAME = 1e-8  # relative change of γ* and δ*² below which they are found
MOST_STEPS = 1000


class SiteEffect(NamedTuple):
    """What a site adds, and by what it stretches, in units of σ: (V,) each."""

    location: np.ndarray  # γ*
    scale: np.ndarray  # δ*


class SiteHarmonisation(NamedTuple):
    """α (V,), β (P, V) and σ (V,) of the training part, and the effect of each of its sites."""

    mean: np.ndarray
    slopes: np.ndarray
    deviation: np.ndarray
    effects: dict[str, SiteEffect]

    @classmethod
    def fit(
        cls, features: np.ndarray, covariates: np.ndarray, sites: Sequence[str]
    ) -> "SiteHarmonisation":
        """Fit all to the training part.

        features: (N, V); covariates: (N, P), numbers such as age and 0/1 for sex; sites: (N,).
        Raises UserError for one site, one without a name, or with fewer than ``FEWEST`` people.
        """
        names, place, counts = np.unique(
            np.array(sites, dtype=str), return_inverse=True, return_counts=True
        )
        if len(names) < 2 or "" in names:
            listed = ", ".join(name or "none given" for name in names)
            raise UserError(f"harmonise: found the sites {listed}; allowed: two or more, of all")
        if few := [name for name, count in zip(names, counts, strict=True) if count < FEWEST]:
            raise UserError(
                f"harmonise: too few training people at {', '.join(few)}; allowed: {FEWEST} a site"
            )
        centre = covariates.mean(axis=0)
        design = np.concatenate([np.eye(len(names))[place], covariates - centre], axis=1)
        fitted = np.linalg.lstsq(design, features, rcond=None)[0]
        at_sites, slopes = fitted[: len(names)], fitted[len(names) :]
        grand = counts @ at_sites / len(features)
        deviation = np.sqrt(((features - design @ fitted) ** 2).mean(axis=0))
        blank = cls(grand - centre @ slopes, slopes, deviation, {})
        residuals = blank.standardise(features, covariates)
        effects = {name: shrink_site_effect(residuals[place == i]) for i, name in enumerate(names)}
        return blank._replace(effects=effects)

    def standardise(self, features: np.ndarray, covariates: np.ndarray) -> np.ndarray:
        """z = (y − α − x·β) / σ, (N, V)."""
        return (features - self.mean - covariates @ self.slopes) / self.deviation

    def with_site(
        self, name: str, features: np.ndarray, covariates: np.ndarray
    ) -> "SiteHarmonisation":
        """Return it with a site more, from the people of its declared reference part.

        Raises UserError for fewer than ``FEWEST``.
        """
        if len(features) < FEWEST:
            problem = f"found {len(features)} people in the reference part of the site {name}"
            raise UserError(f"harmonise: {problem}; allowed: {FEWEST} or more")
        effect = shrink_site_effect(self.standardise(features, covariates))
        return self._replace(effects=self.effects | {name: effect})

    def harmonise(
        self, features: np.ndarray, sites: Sequence[str], covariates: np.ndarray | None = None
    ) -> np.ndarray:
        """Return features (N, V) without what their sites add: y − σ γ*.

        With covariates also without what they stretch: σ (z − γ*) / δ* + α + x·β; these are of
        people whose age is known. Raises UserError for a site without an effect.
        """
        if strange := sorted(set(sites) - set(self.effects)):
            known = ", ".join(sorted(self.effects))
            raise UserError(
                f"harmonise: training has nobody of {', '.join(map(repr, strange))}; allowed: "
                f"{known}, or a declared reference part of such a site (tissue_ridge.reference)"
            )
        location = np.stack([self.effects[site].location for site in sites])
        if covariates is None:
            return features - self.deviation * location
        scale = np.stack([self.effects[site].scale for site in sites])
        left = (self.standardise(features, covariates) - location) / scale
        return left * self.deviation + self.mean + covariates @ self.slopes


def shrink_site_effect(residuals: np.ndarray) -> SiteEffect:
    """γ* and δ* of one site; residuals: z (n, V)."""
    n = len(residuals)
    gamma = residuals.mean(axis=0)
    variance = residuals.var(axis=0, ddof=1)
    gamma_mean, gamma_variance = gamma.mean(), gamma.var(ddof=1)
    mean, spread = variance.mean(), variance.var(ddof=1)
    shape = (2 * spread + mean**2) / spread  # λ, of which mean and variance are those of δ̂²
    rate = (mean * spread + mean**3) / spread  # θ
    location, squared = gamma, variance
    for _ in range(MOST_STEPS):
        weight = n * gamma_variance
        new = (weight * gamma + squared * gamma_mean) / (weight + squared)
        sums = ((residuals - new) ** 2).sum(axis=0)
        new_squared = (rate + sums / 2) / (n / 2 + shape - 1)
        moved = max(np.abs(new - location).max(), np.abs(new_squared / squared - 1).max())
        location, squared = new, new_squared
        if moved < SAME:
            break
    return SiteEffect(location, np.sqrt(squared))


PENALTIES = np.logspace(-3, 3, 25)


class RidgeResult(NamedTuple):
    """How well tissue volumes alone tell age, in years."""

    errors: AgeErrors
    penalty: float  # of features and ages in their deviations
    n_train: int  # volumes
    n_test: int  # volumes, without those of reference parts
    # site → its participants that harmonisation used, who are not in the error
    reference: dict[str, int]
    harmonise: str
    absolute: np.ndarray | None  # |error| of each volume, where all of the test are in it


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
    return RidgeResult(
        errors=measure_age_errors(said_of.ages, {"ridge": said}, said_of.people)["ridge"],
        penalty=float(ridge[-1].alpha_),
        n_train=len(train.ages),
        n_test=len(said_of.ages),
        reference=reference,
        harmonise=settings.harmonise,
        absolute=None if reference else np.abs(said - said_of.ages),
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
