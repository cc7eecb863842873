"""Run a stage, from its command line to its published record."""
