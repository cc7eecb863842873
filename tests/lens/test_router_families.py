from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tools.router_families import PAGE, find_families, read_family

ROWS = [line for line in Path(PAGE).read_text("utf-8").splitlines() if line.startswith("| ")][2:]


def test_the_page_has_all_families():
    routers = [name for names in find_families().values() for name in names]
    assert [row.split(" | ")[1] for row in ROWS] == routers
    assert not [row for row in ROWS if "refused" in row]


@pytest.mark.parametrize("family", find_families())
def test_the_row_of_a_family_is_fresh(family):
    """Build it, run it, record it, and compare the ids with what its experts received."""
    rows = [row for row in ROWS if row.startswith(f"| {family} |")]
    assert rows == [row.line() for row in read_family(family)]
