"""Predictions with a trained model: of pictures, captions, volumes and texts."""
