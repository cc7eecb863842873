"""Teachers, the frozen models that guide routing: a family of parts (base.py)."""
