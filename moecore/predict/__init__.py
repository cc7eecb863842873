"""Predictions with a trained model: of pictures, captions, volumes and texts.

``folder_predictions`` writes a table and a page for a folder, with ``pictures`` (and captions) or
``ages`` (of volumes); ``continuation`` continues a text; ``export`` writes a model as one file.
"""
