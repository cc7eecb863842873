"""MLflow's pages as they are served here: about training, and without notices on the first visit.

MLflow's first page says that it collects usage data, which is not so here, opens a panel for
chats, and takes its reader for a builder of chats. A browser keeps in its local storage that a
reader has closed or chosen these; here that is set before the page's own code runs. What a reader
changes later stays changed.
"""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from moecore.tracking.store import home, uri

# Names and versions as MLflow 3 has them; one that it does not know changes nothing.
CHOSEN = {
    "mlflow.telemetry.info.alert.dismissed_v1": True,
    "mlflow.settings.telemetry.enabled_v1": False,
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
    "_mlflow_model_registry_promo_modal_dismissed_v1": True,
    "mlflow.workflowType_v1": "machine_learning",
}
SCRIPT = """<script>
for (const [name, value] of Object.entries(%s)) {
  if (localStorage.getItem(name) === null) localStorage.setItem(name, JSON.stringify(value));
}
</script>"""
PARENTS = "tags.level = 'method' and tags.`dvc.current` = 'true'"


def charts(server: str, experiment: str | None) -> str:
    """The address of the charts that compare an experiment's methods; without one, of the list."""
    words = {"workflowType": "machine_learning"}
    if experiment is None:
        return f"{server}/#/experiments?{urlencode(words)}"
    words |= {
        "searchFilter": PARENTS,
        "orderByKey": "attributes.start_time",
        "orderByAsc": "true",
        "compareRunsMode": "CHART",
    }
    return f"{server}/#/experiments/{experiment}/runs?{urlencode(words)}"


def app() -> Any:
    """The application that uvicorn serves (``--factory``): MLflow's own, but for its first page."""
    from mlflow import server

    os.environ |= {
        server.BACKEND_STORE_URI_ENV_VAR: uri(),
        server.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        server.ARTIFACTS_DESTINATION_ENV_VAR: str(home() / "mlartifacts"),
        server.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    from mlflow.server.fastapi_app import app as pages
    from starlette.responses import HTMLResponse

    first = Path(str(server.app.static_folder), "index.html").read_text(encoding="utf-8")
    answer = HTMLResponse(first.replace("<script", SCRIPT % json.dumps(CHOSEN) + "<script", 1))

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/":
            await answer(scope, receive, send)
        else:
            await pages(scope, receive, send)

    return served
