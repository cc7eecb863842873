"""How numbers of a history are called in MLflow.

Its page of charts makes a section of what stands before the last slash of a name: ``loss/``,
``train/``, ``validation/`` and ``test/`` of trainings, then one section a measurement. What is
given or counted (numbers of images, of parameters) is a param: a chart of it would be one flat bar.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from moecore.run.history_file import points
from moecore.tracking.store import home, uri

PHASES = ("pretrain", "finetune", "adversarial")  # in the order of training
TRAININGS = ("teacher", *PHASES)
PACE = (
    "epoch",
    "learning_rate",
    "images_per_second",
    "memory_mb",
)  # of a training, beside its scores
GROUPS = {"calibrate": "calibration", "teacher_router": "loss"} | dict.fromkeys(TRAININGS, "test")
COUNTED = ("test_correct",)  # numbers of images that are results
LIMITS = (".low", ".high")
Point = tuple[str, float, int, int]  # name, value, milliseconds, step


class Numbers(NamedTuple):
    """What a stage came to: ``metrics`` are drawn, ``params`` are only listed."""

    metrics: dict[str, float]
    params: dict[str, Any]


def clean(name: str) -> str:
    """A name that MLflow accepts (``@`` is not allowed)."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def curves(lines: list[dict]) -> list[Point]:
    """The logged points."""
    return [
        (curve(name), value, int(t * 1000), step)
        for step, t, values in points(lines)
        for name, value in values.items()
    ]


def curve(name: str) -> str:
    """``train/accuracy``, ``validation/loss``; the terms of the loss are ``loss/…``."""
    for group in ("train", "validation"):
        if name.startswith(f"{group}_"):
            return clean(f"{group}/{name.removeprefix(f'{group}_')}")
    if name in PACE:
        return f"train/{name}"
    return "loss/total" if name == "loss" else clean(f"loss/{name}")


def numbers(stage: str, summary: Mapping[str, Any]) -> Numbers:
    """The result of a stage, from the numbers that its history keeps.

    The limits of an interval are one param; a result's own value is drawn without them.
    """
    metrics = {}
    params: dict[str, Any] = {}
    for name, value in summary.items():
        base, dot, end = name.rpartition(".")
        limits = [summary.get(base + limit) for limit in LIMITS]
        if dot + end in LIMITS and None not in limits:
            words = " to ".join(f"{limit:.4g}" for limit in limits)
            params[clean(f"{stage}.{base}.limits")] = words
        elif isinstance(value, int) and name not in COUNTED:
            params[clean(f"{stage}.{name}")] = value
        elif value is not None:
            metrics[_metric(stage, name)] = float(value)
    return Numbers(metrics, params)


def _metric(stage: str, name: str) -> str:
    group = GROUPS.get(stage, stage)
    words = re.sub(r"\.(value|median)$", "", name)
    if stage in TRAININGS:
        for own in ("test", "validation"):
            if words.startswith(f"{own}_"):
                return clean(f"{own}/{words.removeprefix(f'{own}_')}")
        return clean(f"train/{words} overall")
    return clean(f"{group}/{words}")


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
