"""The figures of a race as a Markdown table, targets beside them.

python -m benchmarks.table [benchmarks/race.json]
"""

import argparse
import json
from pathlib import Path

HEAD = ("race", "size", "precision", "ratio", "quartiles", "of minima", "to reach", "", "ms", "against ms")


def table(result: dict) -> str:
    """Markdown of what ``benchmarks.race`` wrote."""
    lines = [_line(HEAD), _line("---" for _ in HEAD)]
    notes: list[str] = []
    for row in result["rows"]:
        lines.append(_line(_cells(row, notes)))
    machine = result["machine"]
    peak = ", ".join(f"{name} {flops / 1e9:.0f} GFLOP/s" for name, flops in machine["peak_flops"].items())
    words = f"{machine['device_name']}, {machine['threads']} threads; measured peaks: {peak}, {machine['bandwidth'] / 1e9:.0f} GB/s."
    packages = "Versions: " + ", ".join(f"{name} {number}" for name, number in result["versions"].items()) + "."
    quick = ["Quick: 3 rounds; these figures do not count."] if result["quick"] else []
    return "\n".join([*lines, "", words, packages, *quick, *("", *(f"{number}. {note}" for number, note in enumerate(notes, 1)))]) + "\n"


def _cells(row: dict, notes: list[str]) -> tuple[str, ...]:
    start = (row["race"], row["what"], row["precision"])
    if "skipped" in row:
        return (*start, "—", "", "", "", f"skipped: {row['skipped']}", "", "")
    if row["note"] and row["note"] not in notes:
        notes.append(row["note"])
    mark = f" ({notes.index(row['note']) + 1})" if row["note"] else ""
    target = row["target"]
    verdict = "" if target is None else "reached" if row["median"] <= target else "missed"
    if row["rounds"] < 8:
        verdict = f"{verdict}, {row['rounds']} rounds only".lstrip(", ")
    figures = (f"{row['median']:.3g}{mark}", f"{row['low']:.3g} – {row['high']:.3g}", f"{row['minimum']:.3g}")
    return (*start, *figures, "" if target is None else f"≤ {target:g}", verdict, f"{row['ms']:.4g}", f"{row['against_ms']:.4g}")


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="?", type=Path, default=Path("benchmarks/race.json"))
    print(table(json.loads(parser.parse_args().json.read_text(encoding="utf-8"))), end="")


if __name__ == "__main__":
    main()
