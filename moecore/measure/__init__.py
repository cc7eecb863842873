"""Measurements of a trained model: a family of parts (see base.py), and what they share."""
