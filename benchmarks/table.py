"""The figures of a race as a Markdown table.

python -m benchmarks.table [benchmarks/race.json]
"""

import argparse
import json
from pathlib import Path

HEAD = (
    "race",
    "size",
    "precision",
    "ratio",
    "to reach",
    "quartiles",
    "of minima",
    "ms",
    "against ms",
)
ENOUGH = 8  # rounds; fewer are said beside the ratio


def table(result: dict) -> str:
    """Markdown of what ``benchmarks.race`` wrote."""
    notes: list[str] = []
    lines = [_line(HEAD), _line("---" for _ in HEAD)]
    lines += [_line(_cells(row, notes)) for row in result["rows"]]
    lines += ["", _machine(result["machine"]), f"Versions: {_versions(result)}."]
    if result["quick"]:
        lines.append("Quick: 3 rounds; these figures do not count.")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def _machine(machine: dict) -> str:
    peaks = (f"{name} {flops / 1e9:.0f} GFLOP/s" for name, flops in machine["peak_flops"].items())
    bandwidth = f"{machine['bandwidth'] / 1e9:.0f} GB/s"
    start = f"{machine['device_name']}, {machine['threads']} threads; measured peaks: "
    return f"{start}{', '.join(peaks)}, {bandwidth}."


def _versions(result: dict) -> str:
    return ", ".join(f"{name} {number}" for name, number in result["versions"].items())


def _cells(row: dict, notes: list[str]) -> tuple[str, ...]:
    start = (row["race"], row["what"], row["precision"])
    if "skipped" in row:
        return (*start, f"skipped: {row['skipped']}", *[""] * (len(HEAD) - 4))
    if row["note"] and row["note"] not in notes:
        notes.append(row["note"])
    ratio = f"{row['median']:.3g}"
    if row["note"]:
        ratio += f" ({notes.index(row['note']) + 1})"
    if row["rounds"] < ENOUGH:
        ratio += f", {row['rounds']} rounds only"
    return (
        *start,
        ratio,
        "" if row["target"] is None else f"{row['target']:.4g}",
        f"{row['low']:.3g} – {row['high']:.3g}",
        f"{row['minimum']:.3g}",
        f"{row['ms']:.4g}",
        f"{row['against_ms']:.4g}",
    )


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", nargs="?", type=Path, default=Path("benchmarks/race.json"))
    print(table(json.loads(parser.parse_args().json.read_text(encoding="utf-8"))), end="")


if __name__ == "__main__":
    main()
