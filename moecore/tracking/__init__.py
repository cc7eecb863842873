"""MLflow as a view of the histories on disk; the only importer of mlflow.

``sync`` sends what is new in the histories of ``run`` into runs of the store (``stored_run``) under
``metric_names``, with figures and trained models (``model``; ``pyfunc`` loads one). One parent per
method and seed (``generations`` tells what is of its newest model) carries the headline numbers of
``report``; ``view`` says what MLflow's table shows first. ``ui`` runs ``mlflow server`` beside an
import every few seconds. ``store`` finds MLflow's store, and tells in a line what is wrong with it.
"""
