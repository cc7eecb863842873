"""Runs a project through DVC: what has to run, and several stages at a time.

``cli`` is the command ``moecore``. ``code_hashes``, ``closures``: which source decides a result.
``plan``: what would run, and why. ``parallel``, ``job_resources``, ``project_lock``: DVC's
processes side by side, one driver a project. ``stage_fork_server``, ``stage_client``: stages
without their imports. ``study_runs``, ``dvc``: the folders in which questions run.
``check_studies``: whether they are in order. ``begin_project``, ``upgrade_project``: a project of
one's own, from project_template/ and shipped/. ``multi_gpu_estimate``: a training on paper.
"""
