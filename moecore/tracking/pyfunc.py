"""The code of a logged model: MLflow runs this file to load one (models from code)."""

from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class Classifier(PythonModel):
    """``predict({"images": (N, C, H, W) in [0, 1]})`` returns the scores (N, K), before softmax.

    Of a target in its unit (N, 1). A model of text takes ``{"words": (N, C, M)}``, C blocks of M
    words, and scores the last one's next words, (N, M, V). Two towers take ``{"images": …,
    "captions": (T, M)}`` and return scale · cosine + bias of every pair, (N, T).
    """

    def load_context(self, context):
        from moecore.training.artifacts import load_model

        self.model = load_model(context.artifacts["model"])

    def predict(self, context, model_input, params=None):
        # without type hints: MLflow would derive a signature from them
        import torch

        from moecore.tasks.recall import similarities

        given, captions = model_input, None
        if isinstance(model_input, dict):  # MLflow has held it against the signature
            captions = model_input.get("captions")
            [given] = (value for name, value in model_input.items() if name != "captions")
        with torch.inference_mode():
            if captions is not None:
                sides = self.model(torch.as_tensor(given)).prediction.float()
                texts = self.model.targets(torch.as_tensor(captions))[:, 0]
                scores: Any = similarities(sides, texts).numpy()
                return scores
            return self.model(torch.as_tensor(given)).prediction.float().numpy()


set_model(Classifier())
