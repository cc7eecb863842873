"""A claim or question as readers see it, of its entry in compare.json.

The page, claims.md, docs/claims.md and the terminal lay it out, each in its own way.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from moecore.report.tables.cells import json_interval
from moecore.report.tables.number_format import NumberFormat
from moecore.statistics.crossed import BOTH, ITEMS, SEEDS

OVER = {
    BOTH: "over items and seeds",
    ITEMS: "over items, given this one seed",
    SEEDS: "over seeds alone: the metric has no items",
}
ANSWERS = {"holds": "yes", "equivalent": "yes", "differs": "no"}  # to a question


class ClaimRow(NamedTuple):
    """What is printed of a claim or question; texts without a value are ""."""

    verdict: str  # holds, differs or open
    verdict_holm: str  # what Holm's correction leaves of it
    values: tuple[str, str]  # of the method, and of the one that it is held against
    limits: tuple[str, str]  # of these, without a unit
    difference: str
    difference_limits: str  # −0.6 to +1.7
    over: str  # what the interval is over, "items × seeds"; "" without an interval
    without_interval: str  # why there is none
    counts: str  # 3 seeds, 170 items
    detectable: str  # of an open verdict, the smallest difference that could have been seen

    @property
    def notes(self) -> list[str]:
        """What the interval is over; of an open verdict what could have been seen."""
        return [
            note for note in (OVER.get(self.over, self.without_interval), self.detectable) if note
        ]

    def describe_verdict(self, words: Mapping[str, str]) -> str:
        """Return the verdict, what was detectable, and Holm's verdict where it is another.

        words: verdict → how it is printed, where not by its own name.
        """
        text = words.get(self.verdict, self.verdict)
        if self.detectable:
            text += f" ({self.detectable})"
        return "; ".join(filter(None, (text, self.holm_note(words))))

    def holm_note(self, words: Mapping[str, str]) -> str:
        """Return Holm's verdict where it is another, else ""."""
        if self.verdict_holm in ("", self.verdict):
            return ""
        return f"{words.get(self.verdict_holm, self.verdict_holm)} with Holm's correction"


def build_claim_row(entry: Mapping[str, Any]) -> ClaimRow:
    """Return the row of an entry of ``claims`` or ``questions`` in compare.json."""
    form = entry["form"]
    sides = [json_interval(entry[side]) for side in ("method", "against")]
    side_format = NumberFormat.of(form, sides)
    difference = entry["difference"]
    interval = json_interval(difference)
    difference_format = NumberFormat.of(form, [interval])
    kind = difference.get("interval", "")
    reason = "no interval: all items are alike" if difference.get("items") else ""
    counts = f"{difference['seeds']} seeds"
    if difference.get("items"):
        counts += f", {difference['items']:,} items"
    detectable = ""
    if "smallest" in entry:
        detectable = f"detectable: {difference_format.size(entry['smallest'])} at 80 % power"
    return ClaimRow(
        entry["verdict"],
        entry.get("verdict_holm", ""),
        (side_format.value(sides[0].value), side_format.value(sides[1].value)),
        (side_format.limits(sides[0]), side_format.limits(sides[1])),
        difference_format.difference(interval.value),
        difference_format.difference_limits(interval),
        kind,
        "" if kind else reason or "one seed, no interval",
        counts,
        detectable,
    )
