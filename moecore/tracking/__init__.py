"""Show the histories on disk in MLflow; no other room imports mlflow.

``sync`` sends new lines of histories to runs of MLflow's store, with figures and trained models
(``stored_run``; ``pyfunc`` loads a model). One parent run per method and seed has the
headline numbers of ``report``. ``ui`` runs ``mlflow server`` and imports every few seconds.
``mlflow_connection`` connects to the store, and explains its errors.
"""
