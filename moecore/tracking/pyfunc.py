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

    def load_context(self, context: Any) -> None:
        from moecore.training.artifacts import load_model

        packages = (context.model_config or {}).get("packages", ())
        self.model = load_model(context.artifacts["model"], packages)

    def predict(self, context, model_input, params=None):
        # without type hints: MLflow would derive a signature from them
        import torch

        from moecore.tasks.image_text import similarity_matrix

        given = dict(model_input) if isinstance(model_input, dict) else {"images": model_input}
        captions = given.pop("captions", None)
        [inputs] = given.values()
        with torch.inference_mode():
            scores: Any = self.model(torch.as_tensor(inputs)).prediction.float()
            if captions is not None:
                scores = similarity_matrix(
                    scores, self.model.targets(torch.as_tensor(captions))[:, 0]
                )
            return scores.numpy()


set_model(Classifier())
