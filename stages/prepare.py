"""Stage ``prepare``: raw data → checked, split, memory-mappable arrays with a card.

``python -m stages.prepare pretrain`` reads ``data.pretrain`` of params.yaml and writes artifacts/data/pretrain/.
"""

from pathlib import Path
from typing import Annotated

from moecore.config import Config
from moecore.data import Source
from moecore.data.contact import contact_sheet
from moecore.data.prepared import Prepared
from moecore.files import whole_folder
from moecore.history import record
from moecore.params import Key, read
from moecore.stage import run_stage


class Params(Config):
    """What this stage reads of params.yaml."""

    data: Annotated[Source, Key("data.{data}")]


def prepare(name: str) -> None:
    """Prepare the data set under ``data.<name>``."""
    params = read(Params, data=name)
    target = Path("artifacts/data") / name
    with record("prepare", params, phase=name) as run:
        with whole_folder(target) as folder:
            card = params.data.prepare(folder)
        run.dataset(card)
        run.table("counts", [{"split": split, **counts} for split, counts in card["counts"].items()])
        run.figure("samples", contact_sheet(Prepared.open(target)))


if __name__ == "__main__":
    run_stage(prepare)
