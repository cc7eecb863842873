"""MLflow as a view of the histories on disk; the only importer of mlflow.

``sync`` sends what is new in the histories of ``run`` into runs of the store (``stored_run``), with
figures and trained models (``model``; ``pyfunc`` loads one). One parent per method and seed carries
the headline numbers of ``report``. ``ui`` runs ``mlflow server`` and an import every few seconds.
``mlflow_connection`` finds MLflow's store, and tells in a line what is wrong with it.
"""
