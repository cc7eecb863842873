"""The sections ``run``, ``claims`` and ``questions`` of params.yaml."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from moecore.core.config import Config
from moecore.core.files import format_found_and_allowed
from moecore.study.stages import PHASES

if TYPE_CHECKING:
    PhaseName = str
else:
    PhaseName = Literal[PHASES]  # the names in this tuple
Direction = Literal["higher", "lower", "equivalent", "no_worse"]
DIRECTIONS_WITH_MARGIN = ("equivalent", "no_worse")
# of a paper; it may begin with a formula, or be a cell of a table
WHOLE_SENTENCE = re.compile(r'(k ?=|[^a-z…]).*[.?!]|(figure|table) [^"]+: ".+"', re.DOTALL)
TEACHER_WORDS = ("router_kl", "distillation", "teacher")  # words in a method that needs a teacher
FINETUNING_KEYS = ("guided_finetuning", "unguided_regularizers")  # of a method
SAMPLE_KEYS = ("root", "test_unused", "test_limit")  # of data: where they are, and which are tested
SIZE_KEYS = ("images", "batch", "overlays", "augmentations", "sweeps", "audit")  # of a measurement
MEASURING_CLASS_PATTERN = re.compile(r"\((Measurement|Calculation)\):")


class RunSelection(Config):
    """The section ``run``: which methods, seeds, phases and measurements are computed."""

    methods: tuple[str, ...] = Field(description="entries under methods; [] if nothing is trained")
    seeds: tuple[int, ...] = Field(description="one training of each method per seed")
    phases: tuple[PhaseName, ...] = Field(
        ("pretrain", "finetune"), description="phases whose models are calibrated and attacked"
    )
    measurements: tuple[str, ...] = Field(
        (), description="additional measurements, of the models of the phases in thorough"
    )
    calculations: tuple[str, ...] = Field((), description="package.module, without a model, once")
    thorough: tuple[PhaseName, ...] | None = Field(
        None, description="phases whose models get these measurements; left out: all phases"
    )

    @model_validator(mode="after")
    def _all_or_nothing(self) -> Self:
        named = {"methods": self.methods, "seeds": self.seeds, "phases": self.phases}
        empty = [name for name, values in named.items() if not values]
        if empty and len(empty) < len(named):
            allowed = "at least one each, or none of methods, seeds and phases"
            lack = f"none of {' and '.join(empty)}"
            raise ValueError(format_found_and_allowed(found=lack, allowed=allowed))
        return self

    @model_validator(mode="after")
    def _thorough_among_phases(self) -> Self:
        if other := [phase for phase in self.thorough or () if phase not in self.phases]:
            allowed = ", ".join(self.phases)
            raise ValueError(f"thorough names {', '.join(other)}; allowed: {allowed}, as in phases")
        return self

    def covers(self, what: str, phase: PhaseName) -> bool:
        """Return whether ``what``, a stage or measurement, is run on the models of a phase."""
        return self.thorough is None or what not in self.measurements or phase in self.thorough


class Comparison(Config):
    """A comparison of two methods by one metric.

    Or of one method by two metrics of the same images and unit, such as accuracies under two
    attacks.
    """

    metric: str = Field(description="A metric of reports/compare.json.")
    method: str = Field(description="The method or calculation that the claim is about.")
    against: str = Field(description="Another of run.methods, or with against_metric `method`.")
    against_metric: str = Field("", description="Metric of `against`, if it is not `metric`.")
    better: Direction = Field(
        description="higher, lower; equivalent: they differ by at most `margin`; no_worse: not "
        "worse by `margin` or more, in the direction that is good for the metric."
    )
    margin: float | None = Field(
        None, gt=0, description="With equivalent, no_worse: largest difference that counts as none."
    )
    reference_effect: float | None = Field(
        None, gt=0, description="With a margin: a printed effect; the margin is a third or less."
    )
    why: str = Field("", description="Why this margin.")
    phase: PhaseName = Field("pretrain", description="Which models are compared.")

    @model_validator(mode="after")
    def _margin_where_needed(self) -> Self:
        if (self.better in DIRECTIONS_WITH_MARGIN) == (self.margin is None):
            kinds = " and ".join(DIRECTIONS_WITH_MARGIN)
            allowed = f"a margin, a number > 0 in the metric's unit, with {kinds} and only there"
            pair = f"margin {self.margin}, better {self.better}"
            raise ValueError(format_found_and_allowed(found=pair, allowed=allowed))
        if self.margin and self.reference_effect:
            share = self.margin / self.reference_effect
            if share > 1 / 3 and not math.isclose(share, 1 / 3):
                pair = f"margin {self.margin:g}, reference_effect {self.reference_effect:g}"
                allowed = "a third of the reference_effect, or less"
                raise ValueError(format_found_and_allowed(found=pair, allowed=allowed))
        if self.against_metric == self.metric:
            metric = f"against_metric {self.metric}, the metric itself"
            raise ValueError(format_found_and_allowed(found=metric, allowed="another one, or none"))
        return self

    @property
    def subject(self) -> str:
        """The phase whose models are compared; for a calculation its name, package.module."""
        return self.method if "." in self.method else self.phase

    @property
    def words(self) -> str:
        """The comparison as text, such as "match_top1 of prc higher than of vmoe"."""
        ours = f"{self.metric} of {self.method}"
        theirs = f"{self.against_metric} of {self.against}".lstrip()
        if self.better == "equivalent":
            that = "" if self.against_metric else "that "
            return f"{ours} within {self.margin:g} of {that}{theirs}"
        if self.better == "no_worse":
            return f"{ours} at most {self.margin:g} worse than {theirs}"
        return f"{ours} {self.better} than {theirs}"


class Claim(Comparison):
    """A claim of a paper, stated as a comparison of two measured values."""

    paper: str = Field(min_length=1, description="The paper that makes the claim.")
    source: str = Field(min_length=1, description="Place: table 4; figure 3, left; §5.1; the text.")
    says: str = Field(min_length=1, description="The claim in plain words.")
    quote: str = Field(
        min_length=1,
        description='The paper\'s whole sentence, word for word, or a cell: table 4, E = 8: "…".',
    )
    effect: float | None = Field(
        None, allow_inf_nan=False, description="Printed method − against, metric unit; 1 pp: 0.01."
    )

    @field_validator("quote")
    @classmethod
    def _whole_sentence(cls, quote: str) -> str:
        if not WHOLE_SENTENCE.fullmatch(quote):
            end = f"a quote that stops inside a sentence: … {quote[-30:]}"
            allowed = 'whole sentences, up to their ".", "?" or "!", or table N, …: "the cell"'
            raise ValueError(format_found_and_allowed(found=end, allowed=allowed))
        return quote

    @model_validator(mode="after")
    def _has_effects_that_fit(self) -> Self:
        if self.margin and not self.reference_effect:
            allowed = "also a reference_effect, which the paper prints, of three margins or more"
            raise ValueError(format_found_and_allowed(found="a margin alone", allowed=allowed))
        side = {"higher": 1, "lower": -1}.get(self.better)
        if side and self.effect is not None and side * self.effect <= 0:
            sign = ">" if side > 0 else "<"
            effect = f"effect {self.effect:g}, better {self.better}"
            allowed = f"method − against, {sign} 0"
            raise ValueError(format_found_and_allowed(found=effect, allowed=allowed))
        return self


class Question(Comparison):
    """A question that no paper answers; its answer is yes, no or open."""

    asks: str = Field(min_length=1, description="The question in plain words.")
    paper: str = Field("", description="The paper whose method it is about, if any.")


def file_defines_measurement(file: Path) -> bool:
    """Return whether a Python file defines a measurement or a calculation."""
    return MEASURING_CLASS_PATTERN.search(file.read_text(encoding="utf-8")) is not None


def compared_quantity_key(comparison: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that select the two numbers of a claim: metrics, methods and phase."""
    keys = ("metric", "method", "against", "against_metric", "phase")
    return tuple(comparison[key] for key in keys)


def answer_settings_digest(
    study: Mapping[str, Any], comparison: Comparison, left_out: Sequence[str] = ("monitor",)
) -> str:
    """Hash the settings that decide a comparison's result; study: params.yaml, parsed."""
    # These are all sections except run, claims, questions and ``left_out``, with only the two
    # methods that are compared.
    unread = ("run", "claims", "questions", "methods", *left_out)
    sections = {name: section for name, section in study.items() if name not in unread}
    methods, compared = study.get("methods") or {}, (comparison.method, comparison.against)
    sections["methods"] = {name: methods.get(name) for name in compared}
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def design_digest(study: Mapping[str, Any], comparison: Comparison, stage: str = "") -> str:
    """Hash the settings that repetitions of a comparison share; study: params.yaml, parsed.

    Results with equal digests differ in their seeds, and in how many test items they measured.
    Hashed are the model, both methods, data and training of the first and the compared phase, the
    teacher if a method needs one, and the section of the stage that measures the metric, if any.
    """
    phases = list(dict.fromkeys((PHASES[0], comparison.phase)))
    methods = study.get("methods") or {}
    compared = {name: methods.get(name) for name in (comparison.method, comparison.against)}
    if comparison.phase == PHASES[0]:
        compared = _without_keys(compared, FINETUNING_KEYS)
    sections: dict[str, Any] = {name: study.get(name) for name in ("model", *phases)}
    if any(word in json.dumps(compared) for word in TEACHER_WORDS):
        sections |= {name: study.get(name) for name in ("teacher", "teacher_router")}
    data = study.get("data") or {}
    sections |= {"methods": compared, "data": {name: data.get(name) for name in phases}}
    measured = _without_keys(study.get(stage), SIZE_KEYS)
    sections = _without_keys(sections, SAMPLE_KEYS) | {"measured": measured}
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def _without_keys(value: Any, names: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without_keys(v, names) for key, v in value.items() if key not in names}
    if isinstance(value, list):
        return [_without_keys(item, names) for item in value]
    return value


def have_settings_changed(
    stored: str | None, study: Mapping[str, Any], comparison: Comparison
) -> bool:
    """Return whether settings differ from those hashed in ``stored``; False if that is None."""
    # In older files the digest includes ``monitor``, which changes no result.
    same = [answer_settings_digest(study, comparison, left_out) for left_out in (("monitor",), ())]
    return stored is not None and stored not in same
