"""Predict new pictures, captions, volumes and texts with a trained model, and export models."""
