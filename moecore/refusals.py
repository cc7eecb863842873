"""Floor 4: a measurement that is about flat images with classes says so before it begins."""

from pathlib import Path

from moecore.data.prepared import Prepared
from moecore.files import StageError


def flat_images_with_classes(folder: str | Path, stage: str) -> Prepared:
    """The opened prepared folder. Raises StageError where its images are volumes or its labels real numbers, which ``stage`` does not take."""
    data = Prepared.open(folder)
    if data.real or data.test.images.ndim != 4:
        found = f"a real target ({data.card.get('target')})" if data.real else "volumes"
        phase = Path(folder).name
        raise StageError(f"{stage}: data.{phase} has {found}, and this stage measures flat images with classes; leave {phase} out of run.thorough")
    return data
