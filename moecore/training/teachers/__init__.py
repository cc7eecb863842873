"""The teachers that a section ``teacher`` may name: a family of parts (see base.py)."""
