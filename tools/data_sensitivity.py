"""Whether the data of stored answers can tell routers apart: a learned router against a hash.

The control of a round is that of any round with the same data, model and training: the one with
most seeds, and among those the round's own. Where it includes 0, or was never trained, the round's
answers about accuracy are *insensitive*.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moecore.report.claims.answers import Answer, Studies
from moecore.report.claims.claims_table import build_claim_row
from moecore.report.claims.evaluation import CONTROL_ASKS, excludes_zero, find_control_pair
from moecore.report.claims.items_and_dates import compute_claim_from_items
from moecore.report.tables.cells import interval_from_json
from moecore.study.questions import QuestionRound
from moecore.study.run_and_claims import Question, compared_quantity_key
from moecore.study.stages import PHASES
from tools.pooled_claims import PooledAnswer

INSENSITIVE = "insensitive"  # key of an answer's entry, and how its verdict is counted
SCORES = ("test_accuracy", "test_nats", "test_mae")
UNKNOWN = "no hash was trained on these data"


class Control(NamedTuple):
    """The difference between a learned router and a hash router on some data."""

    study: str
    entry: Mapping[str, Any]  # numbers, in the form of a question in compare.json

    @property
    def words(self) -> str:
        """Return ``vmoe − hash_moe = −0.9 pp [−2.1 to +0.3] in ours/controls``."""
        asked = self.entry["asked"]
        row = build_claim_row(self.entry)
        shown = f"{row.difference} [{row.difference_limits}]"
        return f"{asked['method']} − {asked['against']} = {shown} in {self.study}"

    @property
    def is_sensitive(self) -> bool:
        return excludes_zero(interval_from_json(self.entry["difference"]))


# (settings of the data, or the name of a round that trained a control itself; phase; metric)
Controls = Mapping[tuple[str, str, str], Control]


def find_controls(rounds: Sequence[QuestionRound], studies: Studies) -> Controls:
    """Return each round's control and, of each kind of data, the one with most seeds."""
    controls: dict[tuple[str, str, str], Control] = {}
    for study in rounds:
        for question, entry in _list_measured_controls(study, studies[study.name]):
            key = (data_settings(study, question.phase), question.phase, question.metric)
            control = Control(study.name, entry)
            controls[study.name, question.phase, question.metric] = control
            known = controls.get(key)
            seeds = control.entry["difference"]["seeds"]
            if known is None or known.entry["difference"]["seeds"] < seeds:
                controls[key] = control
    return controls


def _list_measured_controls(
    study: QuestionRound, compared: Mapping[str, Any]
) -> Iterator[tuple[Question, Mapping[str, Any]]]:
    data = study.compose().document.data
    methods = data.get("methods") or {}
    run = data["run"]
    pair = find_control_pair({name: methods.get(name) for name in run["methods"]})
    if pair is None or len(run["seeds"]) < 2:
        return
    entries = {**compared.get("claims", {}), **compared.get("questions", {})}.values()
    measured = {compared_quantity_key(entry["asked"]): entry for entry in entries}
    for phase in run.get("phases", ()):
        for metric in SCORES:
            question = Question(
                asks=CONTROL_ASKS,
                metric=metric,
                method=pair.learned,
                against=pair.fixed,
                better="higher",
                phase=phase,
            )
            asked = question.model_dump()
            entry = measured.get(compared_quantity_key(asked))
            entry = entry or compute_claim_from_items(study, compared, question)
            if entry:
                yield question, {"asked": asked} | dict(entry)


def data_settings(study: QuestionRound, phase: str) -> str:
    """Return the settings of data, model and training up to a phase, which a control is about."""
    data = study.compose().document.data
    phases = PHASES[: PHASES.index(phase) + 1]
    sections = {name: data.get(name) for name in ("model", *phases)}
    sections["data"] = {name: data.get("data", {}).get(name) for name in phases}
    return json.dumps(sections, sort_keys=True)


def choose_control(
    study: QuestionRound, phase: str, metric: str, controls: Controls
) -> Control | None:
    """Return the control of a round's data; None if no hash was trained on them."""
    of_data = controls.get((data_settings(study, phase), phase, metric))
    own_control = controls.get((study.name, phase, metric))
    if of_data is None or own_control is None:
        return of_data
    seeds = [control.entry["difference"]["seeds"] for control in (own_control, of_data)]
    return own_control if seeds[0] == seeds[1] else of_data


def mark_insensitive(
    pooled: Sequence[PooledAnswer], rounds: Sequence[QuestionRound], controls: Controls
) -> list[PooledAnswer]:
    """Return the answers; those about accuracy on insensitive data say why under INSENSITIVE."""
    studies = {study.name: study for study in rounds}
    marked = []
    for each in pooled:
        answer = each.answer
        if answer.entry and (why := _why_insensitive(answer, studies[answer.study], controls)):
            each = each._replace(answer=answer._replace(entry=answer.entry | {INSENSITIVE: why}))
        marked.append(each)
    return marked


def _why_insensitive(answer: Answer, study: QuestionRound, controls: Controls) -> str:
    claim = answer.claim
    if {claim.metric, claim.against_metric or claim.metric} - {*SCORES}:
        return ""
    control = choose_control(study, claim.phase, claim.metric, controls)
    if control is None:
        return UNKNOWN
    return "" if control.is_sensitive else control.words


def counted_verdict(answer: Answer) -> str:
    """Return the verdict with Holm's correction; a decided one on insensitive data: INSENSITIVE."""
    entry = answer.entry
    decided = (entry.get("verdict_holm") or entry.get("verdict", "open")) != "open"
    return INSENSITIVE if decided and INSENSITIVE in entry else answer.verdict_holm


def find_sensitive_rounds(rounds: Sequence[QuestionRound], controls: Controls) -> set[str]:
    """Return the rounds whose data tell a learned router from a hash after pretraining."""
    phase = PHASES[0]
    return {
        study.name
        for study in rounds
        for metric in SCORES
        if (control := choose_control(study, phase, metric, controls)) and control.is_sensitive
    }


def describe_round(study: QuestionRound, controls: Controls) -> str:
    """Return a sentence on what a round's data can show, for its README; "" without accuracy."""
    data = study.compose().document.data
    sentences = []
    for phase in data["run"].get("phases", ()):
        for metric in SCORES:
            if control := choose_control(study, phase, metric, controls):
                can = "can" if control.is_sensitive else "are not shown to"
                sentences.append(f"{control.words}: these data {can} tell routers apart ({phase}).")
    return " ".join(sentences)
