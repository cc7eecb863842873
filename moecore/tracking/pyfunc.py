"""The wrapper with which MLflow loads a logged model ("models from code")."""

from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


# A regression returns (N, 1) in its unit. A model of text takes ``{"words": (N, C, M)}``, C
# channels of M words, and returns scores (N, M, V) of the last channel's next words. Two towers
# take ``{"images": …, "captions": (T, M)}`` and return scale · cosine + bias of pairs, (N, T).
class PyfuncModel(PythonModel):
    """``predict({"images": (N, C, H, W) in [0, 1]})`` returns scores (N, K), before softmax."""

    def load_context(self, context: Any) -> None:
        from moecore.training.artifacts import load_model

        packages = (context.model_config or {}).get("packages", ())
        self.model = load_model(context.artifacts["model"], packages)

    def predict(self, context, model_input, params=None):
        # No type hints: MLflow would derive a signature from them.
        import torch

        from moecore.tasks.image_text import similarity_logits

        fields = dict(model_input) if isinstance(model_input, dict) else {"images": model_input}
        captions = fields.pop("captions", None)
        [inputs] = fields.values()
        with torch.inference_mode():
            scores: Any = self.model(torch.as_tensor(inputs)).prediction.float()
            if captions is not None:
                targets = self.model.targets(torch.as_tensor(captions))[:, 0]
                scores = similarity_logits(scores, targets)
            return scores.numpy()


set_model(PyfuncModel())
