"""ComBat: what a site adds to features, and by what it stretches them, beside age and sex.

Feature v of person j at site i:  y = α_v + x_ij·β_v + γ_iv + δ_iv·ε,  ε of variance σ_v².
α, β and σ are fitted to all sites of the training part by least squares; with
z = (y − α_v − x·β_v) / σ_v a site has γ̂ = mean z and δ̂² = var z, which are shrunk over its features
(γ ~ N(γ̄, τ²), δ² ~ inverse gamma(λ, θ), by moments), until nothing changes:
    γ* = (n τ² γ̂ + δ*² γ̄) / (n τ² + δ*²)
    δ*² = (θ + ½ Σ (z − γ*)²) / (n/2 + λ − 1)
Sources: Johnson et al. 2007, §3; Fortin et al. 2018.

What is legitimate: everything is fitted to the training part alone. Without covariates only
y − σ_v γ* is taken, so that no age is needed of whom a model predicts the age of. δ* takes it
(y − x·β is what is stretched): for features of people whose age is known, never to predict it. A
site that the training part lacks is refused, unless a part of it, with known ages, is declared as
its reference: that part is then no test. Where ages of two sites hardly overlap, β cannot tell age
from site, and nothing here can.

N people, V ≥ 2 features, P covariates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moecore.core.files import UserError

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
