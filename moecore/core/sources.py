"""Where the source files lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = Path("artifacts/code")  # their hashes, which the stage `code` writes
FAMILIES = (  # folders of parts; the `__init__` of each holds nothing but their union
    "nn/routers",
    "nn/experts",
    "nn/backbones",
    "data/sources",
    "attacks",
    "tasks",
    "training/regularizers",
    "training/teachers",
    "measure/calibrators",
)
