"""docs/methods.md: every part that params.yaml can name has an entry, and every file it names
exists.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
KIND = re.compile(r'^    kind: Literal\["(\w+)"\]', re.MULTILINE)


def kinds() -> set[str]:
    """The kinds of all parts: settings classes whose `kind` is the stem of their file."""
    found = set()
    for file in (ROOT / "moecore").rglob("*.py"):
        found |= {kind for kind in KIND.findall(file.read_text("utf-8")) if kind == file.stem}
    return found


def test_every_kind_has_an_entry():
    headed = set(re.findall(r"^### .* · `(\w+)`$", TEXT, re.MULTILINE))
    assert kinds() == headed


def test_an_entry_names_its_file_and_every_file_exists():
    for entry in TEXT.split("\n### ")[1:]:
        title = entry.splitlines()[0]
        named = re.findall(r"`((?:moecore|stages|benchmarks)/[\w/.]+)`", entry)
        assert named, f"{title}: no file"
        lost = [path for path in named if not (ROOT / path).is_file()]
        assert not lost, f"{title}: {lost}"


def test_a_kind_is_described_by_its_own_file():
    for entry in TEXT.split("\n### ")[1:]:
        title = entry.splitlines()[0]
        if kind := re.search(r"· `(\w+)`$", title):
            assert f"/{kind[1]}.py`" in entry, title
