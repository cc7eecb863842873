"""The models that a section ``model`` may name: a family of parts (see base_model.py)."""
