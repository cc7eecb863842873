"""The losses that a method may add to the task's: a family of parts (base.py)."""
