"""A user's predictions with a trained model: of pictures, volumes, captions and texts.

``predictions`` takes a folder and writes the table and the page (``page``) of what ``pictures``,
``captions`` and ``ages`` (of ``volumes``) say; ``continuation`` goes on with a text.
"""
