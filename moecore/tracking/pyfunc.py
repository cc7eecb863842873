"""The code of a logged model: MLflow runs this file to load one (models from code)."""

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class Classifier(PythonModel):
    """``predict({"images": (N, C, H, W) in [0, 1]})`` returns the scores (N, K), before softmax.

    Both are float32. Volumes are (N, C, D, H, W). A model of a target returns it in its unit,
    such as an age in years, as (N, 1). One of text takes ``{"words": (N, C, M)}``, int64: C blocks
    of M words, of which the last one's next words are scored, (N, M, V).
    """

    def load_context(self, context):
        from moecore.training.artifacts import load_model

        self.model = load_model(context.artifacts["model"])

    def predict(self, context, model_input, params=None):
        # without type hints: MLflow would derive a signature from them
        import torch

        given = model_input
        if isinstance(model_input, dict):
            [given] = model_input.values()  # MLflow has held it against the signature
        with torch.inference_mode():
            return self.model(torch.as_tensor(given)).prediction.float().numpy()


set_model(Classifier())
