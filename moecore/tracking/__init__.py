"""Show the histories on disk in MLflow; no other room imports mlflow.

One parent run per method and seed has the headline numbers of ``report``. ``ui`` runs
``mlflow server`` and imports every few seconds.
"""
