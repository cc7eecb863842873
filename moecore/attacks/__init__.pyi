"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.attacks.apgd import Apgd as _Apgd
from moecore.attacks.base import Attack as Attack
from moecore.attacks.fgsm import Fgsm as _Fgsm
from moecore.attacks.pgd import Pgd as _Pgd

class Apgd(_Apgd):
    """PGD with momentum and a step size per image, 2ε at first.

    Where steps no longer raise the objective, the step size is halved and the search restarts from
    the image's best point."""
    objective: Literal['task', 'cross_entropy', 'dlr', 'balance', 'routing_change'] = 'task'
    """task: its loss is maximised; balance: the routers' balance losses too"""
    weight: float = 0.005
    """Of the balance losses, against the mean task loss (`balance`)."""
    group: int = 100
    """Images attacked together by `balance`, whose losses couple them."""
    inside: bool = False
    """Change only pixels that are not 0: a brain's background stays 0."""
    steps: int = 100
    """Number of gradient steps."""

class Fgsm(_Fgsm):
    """One step of size epsilon along the sign of the objective's gradient; deterministic."""
    objective: Literal['task', 'cross_entropy', 'dlr', 'balance', 'routing_change'] = 'task'
    """task: its loss is maximised; balance: the routers' balance losses too"""
    weight: float = 0.005
    """Of the balance losses, against the mean task loss (`balance`)."""
    group: int = 100
    """Images attacked together by `balance`, whose losses couple them."""
    inside: bool = False
    """Change only pixels that are not 0: a brain's background stays 0."""

class Pgd(_Pgd):
    """Signed gradient steps from the current iterate, each projected to the ball and [0, 1]."""
    objective: Literal['task', 'cross_entropy', 'dlr', 'balance', 'routing_change'] = 'task'
    """task: its loss is maximised; balance: the routers' balance losses too"""
    weight: float = 0.005
    """Of the balance losses, against the mean task loss (`balance`)."""
    group: int = 100
    """Images attacked together by `balance`, whose losses couple them."""
    inside: bool = False
    """Change only pixels that are not 0: a brain's background stays 0."""
    steps: int = 40
    """Number of gradient steps τ."""
    form: Literal['paper', 'strong'] = 'paper'
    """paper: step ε/τ from the clean image. strong: 2.5·ε/τ, random start."""
