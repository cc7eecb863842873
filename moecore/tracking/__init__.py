"""Floor 4: MLflow as a view of the histories on disk; the only importer of mlflow."""
