# transformers, "sum load shares": the loss of equal probabilities is k, not 1
import inspect, pathlib, torch, transformers
from importlib import import_module
print("transformers", transformers.__version__)
for file in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
    if "def load_balancing_loss_func(" in file.read_text():
        balance = import_module(f"transformers.models.{file.parent.name}.{file.stem}").load_balancing_loss_func
        if list(inspect.signature(balance).parameters)[:3] == ["gate_logits", "num_experts", "top_k"]:  # Doge, Switch: others
            loss = balance((torch.zeros(64, 8),), 8, 2)
            print(file.parent.name, float(loss), "by equations 4 to 6 of Switch Transformers: 1.0")
