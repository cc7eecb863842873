"""The sections ``claims`` and ``questions`` of params.yaml: what is said or asked of methods."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.study.sections import Phase

Direction = Literal["higher", "lower", "equivalent", "no_worse"]
WITH_MARGIN = ("equivalent", "no_worse")


class Comparison(Config):
    """Two methods and one metric: which of them is said to have more of it, or that neither has.

    Or one method and two metrics of the same images and unit, such as accuracies under two attacks.
    """

    metric: str = Field(description="A metric of reports/compare.json.")
    method: str = Field(description="The method that it is said of; one of run.methods.")
    against: str = Field(
        description="One of run.methods; another one unless against_metric is given."
    )
    against_metric: str = Field(
        "", description="What is read of `against`, where that is not `metric`."
    )
    better: Direction = Field(
        description="higher, lower; equivalent: no further apart than `margin`; no_worse: not worse"
        " by `margin` or more, in the direction that is good for the metric."
    )
    margin: float | None = Field(
        None,
        gt=0,
        description="With equivalent and no_worse: the largest difference that counts as none.",
    )
    why: str = Field("", description="Why this margin.")
    phase: Phase = Field("pretrain", description="Which models are compared.")

    @model_validator(mode="after")
    def _margin_where_needed(self) -> Self:
        if (self.better in WITH_MARGIN) == (self.margin is None):
            kinds = " and ".join(WITH_MARGIN)
            allowed = f"a margin, a number > 0 in the metric's unit, with {kinds} and only there"
            raise ValueError(
                f"found margin {self.margin}, better {self.better}; allowed: {allowed}"
            )
        if self.against_metric == self.metric:
            same = f"found against_metric {self.metric}, the metric itself"
            raise ValueError(f"{same}; allowed: another one, or none")
        return self

    @property
    def words(self) -> str:
        """match_top1 of prc higher than of vmoe."""
        ours = f"{self.metric} of {self.method}"
        theirs = f"{self.against_metric} of {self.against}".lstrip()
        if self.better == "equivalent":
            that = "" if self.against_metric else "that "
            return f"{ours} within {self.margin:g} of {that}{theirs}"
        if self.better == "no_worse":
            return f"{ours} at most {self.margin:g} worse than {theirs}"
        return f"{ours} {self.better} than {theirs}"


class Claim(Comparison):
    """One sentence of a paper, put so that it can be measured."""

    paper: str = Field(min_length=1, description="Whose claim it is.")
    source: str = Field(
        min_length=1, description="Where it stands: table 4; figure 3, left; §5.1; the text."
    )
    says: str = Field(min_length=1, description="The claim in plain words.")
    quote: str = Field(min_length=1, description="The paper's sentence, word for word.")
    effect: float | None = Field(
        None,
        allow_inf_nan=False,
        description="What the paper prints as method − against, in the metric's unit; 1 pp: 0.01.",
    )

    @model_validator(mode="after")
    def _effect_on_the_claimed_side(self) -> Self:
        side = {"higher": 1, "lower": -1}.get(self.better)
        if side and self.effect is not None and side * self.effect <= 0:
            allowed = f"method − against, {'>' if side > 0 else '<'} 0"
            problem = f"found effect {self.effect:g}, better {self.better}"
            raise ValueError(f"{problem}; allowed: {allowed}")
        return self


class Question(Comparison):
    """What no paper claims and these runs are asked: answered with yes, no or open."""

    asks: str = Field(min_length=1, description="The question in plain words.")
    paper: str = Field("", description="Whose method it is about; left out: nobody's.")


def compared_quantity_key(asked: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what of a claim or question, as data, decides the numbers, but not the verdict."""
    return tuple(asked[key] for key in ("metric", "method", "against", "against_metric", "phase"))


def answer_settings_digest(
    study: Mapping[str, Any], comparison: Comparison, left_out: Sequence[str] = ("monitor",)
) -> str:
    """Return a digest of the settings that an answer depends on, of a whole params.yaml as data.

    Of methods those of the two alone; which runs, claims and questions there are does not matter.
    left_out: further sections that change no result.
    """
    unread = ("run", "claims", "questions", "methods", *left_out)
    kept = {name: section for name, section in study.items() if name not in unread}
    methods = study.get("methods") or {}
    kept["methods"] = {name: methods.get(name) for name in (comparison.method, comparison.against)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def has_changed_settings(
    stored: str | None, study: Mapping[str, Any], comparison: Comparison
) -> bool:
    """Return whether a digest of compare.json, if any, is of other settings than the study's.

    Some were stored while ``monitor``, which changes no result, was part of the digest.
    """
    same = [answer_settings_digest(study, comparison, one) for one in (("monitor",), ())]
    return stored is not None and stored not in same
