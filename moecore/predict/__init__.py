"""A user's predictions with a trained model: of pictures, volumes, captions and texts.

``folder_predictions`` takes a folder and writes the table and the page of what ``pictures`` (also
with captions) and ``ages`` (of volumes) say; ``continuation`` goes on with a text; ``export``
writes a model as one file.
"""
