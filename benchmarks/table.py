"""Print the figures of a race as a Markdown table.

    python -m benchmarks.table [benchmarks/race.json]
    python -m benchmarks.table --gpu FOLDER [--into benchmarks/README.md]

--gpu reads what benchmarks/gpu_quarter_hour.sh wrote into a folder, and puts the table between the
marks of a file; ``-`` prints it.
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
ENOUGH = 8  # rounds; a smaller number is printed next to the ratio
GPU_HEAD = ("race", "size", "precision", "found", "to reach", "quartiles", "ms", "against ms")
GPU_PARTS = (
    "environment",
    "equality",
    "layers",
    "triton",
    "graph",
    "peers",
    "steps",
    "jobs",
    "memory",
    "repro",
)
BEGIN = "<!-- written by python -m benchmarks.table --gpu -->"
END = "<!-- end of the table of a GPU -->"
README = Path("benchmarks/README.md")


def table(result: dict) -> str:
    """Return a result of ``benchmarks.race`` as Markdown."""
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


def gpu_table(folder: Path) -> str:
    """Return all parts of ``benchmarks.gpu`` in a folder as Markdown, and list missing ones."""
    notes: list[str] = []
    lines = [_line(GPU_HEAD), _line("---" for _ in GPU_HEAD)]
    missing: list[str] = []
    last: dict = {}
    for part in GPU_PARTS:
        path = folder / f"{part}.json"
        if not path.is_file():
            missing.append(f"{part} (not run)")
            continue
        last = json.loads(path.read_text(encoding="utf-8"))
        lines += [_line(_gpu_cells(row, notes)) for row in last["rows"]]
        if not last["finished"]:
            missing.append(f"the rest of {part} (it was stopped or failed)")
    if not last:
        files = ", ".join(f"{part}.json" for part in GPU_PARTS)
        raise SystemExit(f"{folder}: found no results; allowed: a folder with any of {files}")
    lines += ["", _machine(last["machine"]), f"Versions: {_versions(last)}."]
    if missing:
        lines.append(f"Not measured: {', '.join(missing)}.")
    if last["dry_run"]:
        lines.append("A dry run: tiny sizes on a CPU; these figures do not count.")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines).rstrip() + "\n"


def _gpu_cells(row: dict, notes: list[str]) -> tuple[str, ...]:
    start = (row["race"], row["what"], row["precision"])
    if "skipped" in row:
        return (*start, row["skipped"].replace("|", "/"), *[""] * (len(GPU_HEAD) - 4))
    target = "" if row["target"] is None else f"{row['target']:.4g}"
    if target:
        target = f"≥ {target}" if row.get("at_least") else f"≤ {target}"
    if "value" in row:
        value = f"{row['value']:.3g} {row['unit']}".strip() + _number_of_note(row, notes)
        return (*start, value, target, *[""] * (len(GPU_HEAD) - 5))
    quartiles = f"{row['low']:.3g} – {row['high']:.3g}"
    times = f"{row['ms']:.4g}", f"{row['against_ms']:.4g}"
    return (*start, _ratio(row, notes), target, quartiles, *times)


def write_between_marks(path: Path, text: str) -> None:
    """Replace the text between ``BEGIN`` and ``END`` in a file; SystemExit if one is missing."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path}: found no {END if begin else BEGIN}; allowed: a file with both")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def _number_of_note(row: dict, notes: list[str]) -> str:
    if not row["note"]:
        return ""
    if row["note"] not in notes:
        notes.append(row["note"])
    return f" ({notes.index(row['note']) + 1})"


def _ratio(row: dict, notes: list[str]) -> str:
    ratio = f"{row['median']:.3g}{_number_of_note(row, notes)}"
    if row["rounds"] < ENOUGH:
        ratio += f", {row['rounds']} rounds only"
    return ratio


def _cells(row: dict, notes: list[str]) -> tuple[str, ...]:
    start = (row["race"], row["what"], row["precision"])
    if "skipped" in row:
        return (*start, f"skipped: {row['skipped']}", *[""] * (len(HEAD) - 4))
    return (
        *start,
        _ratio(row, notes),
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
    parser.add_argument("--gpu", type=Path, metavar="FOLDER", help="with a JSON per part")
    into = f"with --gpu: the file with the marks (default {README}); -: print it"
    parser.add_argument("--into", type=Path, default=README, help=into)
    options = parser.parse_args()
    if options.gpu is None:
        print(table(json.loads(options.json.read_text(encoding="utf-8"))), end="")
    elif options.into == Path("-"):
        print(gpu_table(options.gpu), end="")
    else:
        write_between_marks(options.into, gpu_table(options.gpu))


if __name__ == "__main__":
    main()
