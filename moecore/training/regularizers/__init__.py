"""The losses beside the task that a method may name: a family of parts (see base.py)."""
