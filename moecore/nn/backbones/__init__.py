"""Models of images, volumes and texts: a family of parts (see base_model.py)."""
