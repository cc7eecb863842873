"""The teachers of a section ``teacher``: a family of parts (base.py)."""
