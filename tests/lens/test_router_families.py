from pathlib import Path

import pytest

ROWS = Path("docs/router_families.md").read_text("utf-8").splitlines()
ROWS = [line for line in ROWS if line.startswith("| ")][2:]
FAMILIES = dict.fromkeys(row.removeprefix("| ").split(" | ")[0] for row in ROWS)


@pytest.fixture(scope="module")
def tool():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tools import router_families  # imports transformers: only one worker does

    return router_families


def test_the_page_has_all_families(tool):
    routers = [name for names in tool.find_families().values() for name in names]
    assert [row.split(" | ")[1] for row in ROWS] == routers
    assert tool.PAGE == Path("docs/router_families.md")
    assert not [row for row in ROWS if "refused" in row]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_of_a_family_is_fresh(family, tool):
    """Build it, run it, record it, and compare the ids with what its experts received."""
    rows = [row for row in ROWS if row.startswith(f"| {family} |")]
    assert rows == [row.line() for row in tool.read_family(family)]
