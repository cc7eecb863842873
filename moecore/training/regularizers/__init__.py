"""Regularizers, the losses that a method adds to the task's: a family of parts (base.py)."""
