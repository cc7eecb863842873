"""How large a model is."""

from torch import nn


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """All parameters, and those that one token uses: of E experts only the k that are chosen."""
    total = sum(parameter.numel() for parameter in model.parameters())
    if model.moe is None:
        return {"parameters": total, "active_parameters": total}
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    return {"parameters": total, "active_parameters": total - round(experts * (1 - model.moe.active_share))}
