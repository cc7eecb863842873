"""The fit of the teacher's routers, balanced and confident, without the task's loss.

TGR-MoE, equation 8.
"""

from collections.abc import Iterator

import torch

from moecore.core.streams import derived_seed
from moecore.data.loader import Loaded, batch_indices
from moecore.data.views.views import evaluation_images
from moecore.training.guide import Guide
from moecore.training.method import TeacherRouter
from moecore.training.regularizers.teacher_router import teacher_router_terms
from moecore.training.settings import TeacherRouterFit

LOG_EVERY = 20


def iterate_router_fit(
    guide: Guide, train: Loaded, weights: TeacherRouter, settings: TeacherRouterFit, seed: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train the guide's routers in place; yield (step, loss terms) regularly and at the end."""
    # Batches are drawn independently of the student's.
    fit_seed = derived_seed("teacher_router", seed)
    guide.routers.requires_grad_(True)
    parameters = guide.routers.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    for step in range(1, settings.steps + 1):
        indices = batch_indices(len(train.labels), settings.batch, fit_seed, step - 1)
        images, _ = train.take(indices)
        terms = teacher_router_terms(probs=guide(evaluation_images(images)).probs)
        loss = weights.load * terms["balance"] + weights.entropy * terms["entropy"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0 or step == settings.steps:
            yield step, {"loss": loss.item()} | {name: term.item() for name, term in terms.items()}
    guide.routers.requires_grad_(guide.learns)
