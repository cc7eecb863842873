"""Stage ``prepare``: converts raw data to checked, split, memory-mappable arrays with a card.

``moecore.stages.prepare pretrain`` reads ``data.pretrain``, writes artifacts/data/pretrain/.
"""

from pathlib import Path
from typing import Annotated

from moecore.core import config, files
from moecore.data.raw_data_changes import fingerprint_raw_folders
from moecore.data.sources.base import Source
from moecore.run import run_record, stage_entry, stage_inputs
from moecore.study.params_reader import ParamsKeyTemplate, read_stage_params


class Params(config.Config):
    data: Annotated[Source, ParamsKeyTemplate("data.{data}")]


def prepare(name: str) -> None:
    """Prepare the data source ``data.<name>`` of params.yaml in artifacts/data/<name>."""
    params = read_stage_params(Params, data=name)
    target = Path("artifacts/data") / name
    inputs = stage_inputs.build_stage_inputs("prepare", params, [], phase=name)
    with run_record.record_run("prepare", params, phase=name, inputs=inputs) as run:
        if folders := fingerprint_raw_folders(params.data):  # before they are read
            run.write_table("raw", [folder._asdict() for folder in folders])
        with files.atomic_folder(target) as folder:
            card = params.data.write(folder)
        run.log_dataset(card)
        run.write_table("counts", [{"split": key, **row} for key, row in card["counts"].items()])


if __name__ == "__main__":
    stage_entry.run_stage(prepare)
