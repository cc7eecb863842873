"""Raw data that changed since they were prepared, which DVC does not see."""

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from moecore.core.files import read_json
from moecore.data.raw_data_changes import describe_change
from moecore.study.document import load_yaml_document

HISTORY = Path("artifacts/history/prepare")  # where `prepare` records the folders that it saw
RECORD = Path("tables/raw.json")


def describe_changed_raw_data(params: Path) -> Iterator[str]:
    """Yield a line for each folder under ``data`` that is not as ``prepare`` saw it."""
    sections = load_yaml_document(str(params)).data.get("data")
    with chdir(params.parent):
        for name in sections if isinstance(sections, dict) else ():
            record = HISTORY / name / RECORD
            for before in read_json(record) if record.is_file() else []:
                if change := describe_change(before):
                    mend = f"to prepare it again: `dvc repro -f -s prepare@{name}`"
                    yield f"{params.name}: data.{name}: {change}; {mend}, then `moecore run`"
