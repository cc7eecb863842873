"""What every attack says of itself before it is run."""

from typing import Any

from torch import nn

from moecore.core.config import Config
from moecore.tasks.base import Task


class AttackBase(Config):
    """The settings of an attack on images, with its name and what it cannot attack."""

    kind: Any  # the file's stem

    @property
    def name(self) -> str:
        """The kind and whatever differs from its defaults: pgd, pgd-10, pgd-inside-10."""
        changed = self.model_dump(exclude={"kind"}, exclude_defaults=True)
        # A switch that is on is called by its key: "inside" says more than "True".
        words = [key if value is True else str(value) for key, value in changed.items()]
        return "-".join([self.kind, *words])

    @property
    def together(self) -> int | None:
        """How many images it must get at once, since they matter to each other; None: any."""
        return None

    @property
    def climbs_task(self) -> bool:
        """Whether it climbs the task's own loss, so that it can be compared with others that do."""
        return False

    def refuses(self, task: Task) -> str | None:
        """Why these settings make no sense for a task, in words; None where they do."""
        return None

    def does_not_apply(self, model: nn.Module, task: Task) -> str | None:
        """Why there is nothing to attack in this model, in words; None where there is."""
        return self.refuses(task)
