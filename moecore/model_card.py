"""The card of a brain-age model in words: what it was made of, how well it does, and what it must not be used for."""

from collections.abc import Mapping
from typing import Any

SIMULATED = (
    "**The volumes are SIMULATED.** They show that the software works: that it finds an effect of age that was put in, and how large its errors "
    "are on this simulation. They can support no statement about people, patients, scanners or diseases, and an error of so many years here "
    "says nothing about the error on real scans."
)
REAL = "The volumes are scans of people. The numbers hold for people, scanners and a preparation like those of this cohort, and for no others."
NOT_FOR = """\
- **No diagnosis and no decision about a person.** The interval of one prediction is wide (see above); a large brain-PAD is no finding.
- **No use outside the age range, the scanners and the preparation of the training data.** Volumes unlike these are flagged in `qc_flags`:
  a flagged prediction is not to be used, and an unflagged one is not thereby right.
- **No comparison of groups that differ in age, sex, site or head size** without taking these into account: brain-PAD depends on age by
  construction, and the correction removes that dependence only for people like those it was fitted to.
- **No causal reading.** Brain-PAD (predicted minus known age) is not a measured rate of ageing, nor brain health, nor a biological age. It
  mixes individual anatomy, errors of the model and artefacts of the scan.
- **No selection of people** (insurance, employment, asylum, access to treatment)."""


def model_card(card: Mapping[str, Any], measured: Mapping[str, Any], item: str) -> str:
    """The text of MODEL_CARD.md. card: the prepared data's; measured: what ``calibrate`` found; item: phase/method/seed."""
    simulated = card["simulated"]
    sections = [
        f"# Brain-age model {item}{' (SIMULATED data)' if simulated else ''}",
        SIMULATED if simulated else REAL,
        "## Data",
        _data(card, measured),
        "## Error on the test split",
        _errors(measured),
        "## Not for",
        NOT_FOR,
    ]
    return "\n\n".join(sections) + "\n"


def _data(card: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    low, high = card["target_range"]
    sexes = {split: ", ".join(f"{name} {number}" for name, number in counts.items()) for split, counts in card["counts"].items()}
    lines = [
        f"{card['name']}; {card['source']}. Licence: {card['licence']}.",
        *(f"{split}: {card['images'][split]} volumes ({sexes[split]})." for split in card["counts"]),
        f"Ages in training: {low:.1f} to {high:.1f} {card['unit']}.",
        f"Volumes of {' × '.join(map(str, card['size']))} voxels of {' × '.join(f'{edge:g}' for edge in card['voxel_mm'])} mm.",
        f"Left out when the cohort was read: {len(card['skipped'])}.",
        f"Weights: sha256 {measured['predictor_sha256']}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _errors(measured: Mapping[str, Any]) -> str:
    names = {"raw": "as predicted", "pooled": "corrected, one line", "sex_specific": "corrected, a line per sex"}
    keys = ("mae", "corr", "slope", "intercept")
    known = {words: measured[name] for name, words in names.items() if measured[name]}
    rows = [f"| {words} | {' | '.join(_cell(found[key]) for key in keys)} |" for words, found in known.items()]
    head = "| Prediction | MAE, years | corr(ŷ − y, y) | slope | intercept |\n| --- | --- | --- | --- | --- |"
    low, high = measured["age_range"]
    test = f"{measured['n_test']} test volumes, ages {low:.1f} to {high:.1f}; in brackets 95 % intervals over participants."
    median = f"Always saying the training's median age has an MAE of {measured['median_mae']:.2f} years."
    return "\n\n".join(["\n".join([head, *rows]), f"{test} {median}", _correction(measured), _interval(measured["interval"])])


def _correction(measured: Mapping[str, Any]) -> str:
    if measured["refused"]:
        return f"No correction was fitted: {measured['refused']}."
    return f"The correction was fitted on {measured['n_fit']} predictions ({measured['fit_on'].replace('_', ' ')})."


def _interval(interval: Mapping[str, Any]) -> str:
    if interval["radius"] is None:
        return f"No interval is given for a single prediction: {interval['n']} validation participants are too few."
    covered = f"{interval['coverage']['value']:.0%}"
    return (
        f"Interval of a single prediction ({interval['level']:.0%}, split conformal, {interval['n']} validation participants): "
        f"± {interval['radius']:.1f} years; it held {covered} of the test volumes."
    )


def _cell(found: Mapping[str, float | None]) -> str:
    value, low, high = (found[name] for name in ("value", "low", "high"))
    return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")
