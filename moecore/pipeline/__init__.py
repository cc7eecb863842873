"""Run a project through DVC: what has to run, and several stages at a time."""
