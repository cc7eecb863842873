"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.attacks.apgd import Apgd as _Apgd
from moecore.attacks.autoattack import Autoattack as _Autoattack
from moecore.attacks.base import Attack as Attack
from moecore.attacks.fab import Fab as _Fab
from moecore.attacks.fgsm import Fgsm as _Fgsm
from moecore.attacks.pgd import Pgd as _Pgd
from moecore.attacks.square import Square as _Square
from moecore.attacks.surrogate import Surrogate as _Surrogate

class Apgd(_Apgd):
    """PGD with momentum and a step size per image, 2ε at first.

    Where steps no longer raise the objective, the step size is halved and the search restarts from
    the image's best point."""
    eps: float | None = None
    """Own radius, in its norm; null: `epsilons`."""
    norm: Literal['linf', 'l2'] = 'linf'
    """Of the ball. A section's epsilons are L∞ radii."""
    objective: Literal['task', 'cross_entropy', 'dlr', 'targeted_dlr', 'balance', 'routing_change', 'routing_margin', 'task_and_routing'] = 'task'
    """task: its loss is maximised; balance: the routers' balance losses too; routing_margin: a
    token's next expert against its k-th; task_and_routing: both"""
    weight: float = 0.005
    """Of the balance losses (`balance`) or the routing margin (`task_and_routing`), against the
    task loss."""
    group: int = 100
    """Images at once with `balance`, which couples them."""
    inside: bool = False
    """Change only pixels that are not 0, no background."""
    targets: int | Literal['all'] | None = None
    """Other classes that `targeted_dlr` aims at, one after the other, the most likely first: a
    number of 1 or more, or all; null: 9, or all of fewer."""
    steps: int = 100
    """Number of gradient steps."""
    restarts: int = 1
    """Random starts; the largest objective counts."""

class Autoattack(_Autoattack):
    """APGD on cross-entropy and targeted DLR, targeted FAB and Square, in this order."""
    eps: float | None = None
    """Own radius, in its norm; null: `epsilons`."""
    norm: Literal['linf', 'l2'] = 'linf'
    """Of the ball. A section's epsilons are L∞ radii."""
    version: Literal['standard', 'plus', 'rand'] = 'standard'
    """plus: also 5 starts of APGD-CE, APGD-DLR and FAB without targets. rand: only APGD-CE and
    APGD-DLR, of models with noise, whose gradients are means of 20 passes."""
    steps: int = 100
    """Of APGD and FAB."""
    queries: int = 5000
    """Of Square."""
    targets: int | Literal['all'] | None = None
    """Of APGD-T and FAB-T, as of `targeted_dlr`."""

class Fab(_Fab):
    """Seek the nearest misclassified image, by steps to the model's linearised boundary."""
    eps: float | None = None
    """Own radius, in its norm; null: `epsilons`."""
    norm: Literal['linf', 'l2'] = 'linf'
    """Of the ball. A section's epsilons are L∞ radii."""
    steps: int = 100
    """Number of steps."""
    aim: Literal['classes', 'nearest'] = 'classes'
    """classes: at one after the other (FAB-T). nearest: at that of the nearest boundary, which
    takes all classes' gradients at each step."""
    targets: int | Literal['all'] | None = None
    """Other classes to aim at, as of `targeted_dlr`."""
    restarts: int = 1
    """Starts; all but the first are random."""

class Fgsm(_Fgsm):
    """One step of size epsilon along the gradient (in L∞ its sign); deterministic."""
    eps: float | None = None
    """Own radius, in its norm; null: `epsilons`."""
    norm: Literal['linf', 'l2'] = 'linf'
    """Of the ball. A section's epsilons are L∞ radii."""
    objective: Literal['task', 'cross_entropy', 'dlr', 'targeted_dlr', 'balance', 'routing_change', 'routing_margin', 'task_and_routing'] = 'task'
    """task: its loss is maximised; balance: the routers' balance losses too; routing_margin: a
    token's next expert against its k-th; task_and_routing: both"""
    weight: float = 0.005
    """Of the balance losses (`balance`) or the routing margin (`task_and_routing`), against the
    task loss."""
    group: int = 100
    """Images at once with `balance`, which couples them."""
    inside: bool = False
    """Change only pixels that are not 0, no background."""
    targets: int | Literal['all'] | None = None
    """Other classes that `targeted_dlr` aims at, one after the other, the most likely first: a
    number of 1 or more, or all; null: 9, or all of fewer."""

class Pgd(_Pgd):
    """Gradient steps (in L∞ their signs), each projected to the ball and [0, 1]."""
    eps: float | None = None
    """Own radius, in its norm; null: `epsilons`."""
    norm: Literal['linf', 'l2'] = 'linf'
    """Of the ball. A section's epsilons are L∞ radii."""
    objective: Literal['task', 'cross_entropy', 'dlr', 'targeted_dlr', 'balance', 'routing_change', 'routing_margin', 'task_and_routing'] = 'task'
    """task: its loss is maximised; balance: the routers' balance losses too; routing_margin: a
    token's next expert against its k-th; task_and_routing: both"""
    weight: float = 0.005
    """Of the balance losses (`balance`) or the routing margin (`task_and_routing`), against the
    task loss."""
    group: int = 100
    """Images at once with `balance`, which couples them."""
    inside: bool = False
    """Change only pixels that are not 0, no background."""
    targets: int | Literal['all'] | None = None
    """Other classes that `targeted_dlr` aims at, one after the other, the most likely first: a
    number of 1 or more, or all; null: 9, or all of fewer."""
    steps: int = 40
    """Number of gradient steps τ."""
    form: Literal['paper', 'strong'] = 'paper'
    """paper: step ε/τ from the clean image. strong: 2.5·ε/τ, random start."""
    restarts: int = 1
    """Random starts, strong form; the largest counts."""
    length: float = 2.5
    """Step of the strong form, in units of ε/τ."""

class Square(_Square):
    """Change squares of random place and sign, and keep what lowers the margin; no gradients."""
    eps: float | None = None
    """Own radius, in its norm; null: `epsilons`."""
    norm: Literal['linf', 'l2'] = 'linf'
    """Of the ball. A section's epsilons are L∞ radii."""
    queries: int = 5000
    """Number of passes per image."""

class Surrogate(_Surrogate):
    """APGD on a copy of the model whose top-k choice is soft (as BPDA, Athalye et al. 2018).

    At low temperature the copy tends to the model. ``direct`` then runs APGD on the model itself,
    from the images found on the copy."""
    eps: float | None = None
    """Own radius, in its norm; null: `epsilons`."""
    norm: Literal['linf', 'l2'] = 'linf'
    """Of the ball. A section's epsilons are L∞ radii."""
    objective: Literal['task', 'cross_entropy', 'dlr', 'targeted_dlr', 'balance', 'routing_change', 'routing_margin', 'task_and_routing'] = 'task'
    """task: its loss is maximised; balance: the routers' balance losses too; routing_margin: a
    token's next expert against its k-th; task_and_routing: both"""
    weight: float = 0.005
    """Of the balance losses (`balance`) or the routing margin (`task_and_routing`), against the
    task loss."""
    group: int = 100
    """Images at once with `balance`, which couples them."""
    inside: bool = False
    """Change only pixels that are not 0, no background."""
    targets: int | Literal['all'] | None = None
    """Other classes that `targeted_dlr` aims at, one after the other, the most likely first: a
    number of 1 or more, or all; null: 9, or all of fewer."""
    steps: int = 100
    """Number of gradient steps."""
    temperature: float | Literal['probs'] = 0.1
    """Of gates, in logits; probs: all, by probs."""
    direct: bool = False
    """Go on with APGD on the model itself, as many steps."""
