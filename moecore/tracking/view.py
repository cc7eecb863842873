"""What MLflow's table of runs shows first: a view that is saved with the experiment.

MLflow keeps views as tags of the experiment and opens the one that an address names.
"""

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from moecore.tracking.stored_run import LEVEL, PHASES, StoredRun

CURRENT = "dvc.current"  # whether a run's stage is up to date; of a parent, whether it is newest
KEY = "methods"
TAG = f"mlflow.sharedViewState.{KEY}"
NAME = "Methods side by side"


def save_view(client: Any, experiment: Any, parents: Iterable[StoredRun]) -> None:
    """Let the view show the headline numbers that ``parents`` have, the last phase's first."""
    names = sorted({name for run in parents for name in run.metrics})
    shown = [name for phase in reversed(PHASES) for name in names if name.startswith(f"{phase}/")]
    columns = [f"metrics.`{name}`" for name in shown]
    columns += [f"attributes.`{name}`" for name in ("Dataset", "Source", "Models")]
    state = {
        "searchFilter": f"tags.{LEVEL} = 'method' and tags.`{CURRENT}` = 'true'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "selectedColumns": columns,
        "columnOrder": columns,
    }
    created = experiment.creation_time
    text = json.dumps({"name": NAME, "createdAt": created, "state": json.dumps(state)})
    if experiment.tags.get(TAG) != text:
        client.set_experiment_tag(experiment.experiment_id, TAG, text)


def view_address(server: str, experiment: Any) -> str:
    """Return the address of an experiment's view."""
    words = {"workflowType": "machine_learning", "viewStateShareKey": KEY}
    return f"{server}/#/experiments/{experiment.experiment_id}/runs?{urlencode(words)}"
