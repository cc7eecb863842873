"""Which experts' products are taken together on CPU, and where their rows lie in them.

E experts, R rows, n columns. A loop over hundreds of experts with a row or two each spends its time
between the products. So where experts are many and have few rows, consecutive ones make a group:
their rows lie on S slots for each expert, S the rows of the fullest, and one batched product does
for all (``benchmarks/crossover.py`` prints where that pays).
"""

from typing import NamedTuple

import torch
from torch import Tensor

MANY_EXPERTS = 64  # from which on they are grouped; fewer, one by one, cost little
GROUPED_SLOTS = 128  # per expert, up to which a group is faster where it has ROUNDED_EXPERTS
ROUNDED_EXPERTS = 8  # fewer are so large that a product of one's own keeps both cores busy
# up to which a product waits for its weights, and to round them to bf16 costs more
EXACT_SLOTS = 32
GROUP = 3 << 20  # entries of the weights of a group, which in bf16 stay in an L3 cache


class ExpertGroup(NamedTuple):
    """Experts whose products are taken together, or one alone (an int)."""

    experts: int | slice
    rows: slice
    slots: int  # of each expert

    @property
    def alone(self) -> bool:
        return isinstance(self.experts, int)


class ExpertGroups:
    """``groups`` of experts in order; ``idle``: experts without rows, in no group."""

    def __init__(self, offsets: Tensor, weight: Tensor) -> None:
        ends = [0, *offsets.tolist()]
        self.sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        self.groups: list[ExpertGroup] = []
        self.idle: list[int] = []
        shifts = [0] * len(self.sizes)  # from a row's number to its slot in its group
        many = 1
        if offsets.device.type == "cpu" and len(self.sizes) >= MANY_EXPERTS:
            many = max(1, GROUP // max(1, weight[0].numel()))
        for first in range(0, len(self.sizes), many):
            sizes = self.sizes[first : first + many]
            slots = max(sizes)
            if many > 1 and _share_product(sizes, many):
                last = first + len(sizes)
                rows = slice(ends[first], ends[last])
                self.groups.append(ExpertGroup(slice(first, last), rows, slots))
                for expert in range(first, last):
                    shifts[expert] = (expert - first) * slots - ends[expert]
                continue
            for expert, size in enumerate(sizes, start=first):
                if size:
                    rows = slice(ends[expert], ends[expert + 1])
                    self.groups.append(ExpertGroup(expert, rows, size))
                else:
                    self.idle.append(expert)
        if many > 1:
            each = torch.tensor(shifts).repeat_interleave(torch.tensor(self.sizes))
            self.slots = each + torch.arange(ends[-1])

    def pad_rows(self, rows: Tensor, group: ExpertGroup, dtype: torch.dtype) -> Tensor:
        """The group's rows of (R, n): as they are for one expert, (experts, S, n) with zeros on
        free slots for several; then in ``dtype``, that of the weights, where slots are few.
        """
        part = rows[group.rows]
        if isinstance(group.experts, int):
            return part
        if group.slots <= EXACT_SLOTS:
            part = part.to(dtype)
        number = group.experts.stop - group.experts.start
        padded = part.new_zeros(number * group.slots, part.shape[1])
        padded.index_copy_(0, self.slots[group.rows], part)
        return padded.view(number, group.slots, -1)

    def output_view(self, rows: Tensor, group: ExpertGroup) -> Tensor | None:
        """Return where an expert's product may be written at once; None for several experts."""
        if group.alone:
            return rows[group.rows]
        return None

    def unpad_rows(self, padded: Tensor, group: ExpertGroup, rows: Tensor) -> None:
        """Write what several experts have on their slots to the rows (R, n)."""
        if not group.alone:
            values = padded.flatten(0, 1).index_select(0, self.slots[group.rows])
            rows[group.rows].copy_(values)


def _share_product(sizes: list[int], many: int) -> bool:
    """Return whether experts with these rows share a product, of groups of ``many``.

    Up to EXACT_SLOTS it waits for the weights, and free slots cost nothing; an expert alone spares
    the weights of those without rows, so a third must have some. Above, free slots cost as much as
    others: at most half may be free.
    """
    slots = max(sizes)
    if slots <= EXACT_SLOTS:
        return 3 * sum(size > 0 for size in sizes) >= len(sizes)
    is_half_full = 2 * sum(sizes) >= len(sizes) * slots
    return many >= ROUNDED_EXPERTS and slots <= GROUPED_SLOTS and is_half_full
