"""How large a model is."""

from moecore.nn.backbones.model import Model


def parameter_counts(model: Model) -> dict[str, int]:
    """All parameters, and those that one token uses: of E experts only the k that are chosen."""
    total = sum(parameter.numel() for parameter in model.parameters())
    moe = model.moe
    if moe is None:
        return {"parameters": total, "active_parameters": total}
    experts = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name
    )
    return {
        "parameters": total,
        "active_parameters": total - round(experts * (1 - moe.active_share)),
    }
