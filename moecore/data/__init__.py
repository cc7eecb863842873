"""Data sets: a source's raw data become a prepared folder, which training opens.

``sources/`` has one module per kind of data; ``files/`` is shared by sources of image files;
``text/``, ``volumes/`` and ``phantom/`` serve one kind of data each. ``views/`` augments images for
training; ``corruptions`` degrades them for measurements. ``prepared`` opens a folder, ``layouts/``
writes and opens its files, ``loader`` gives each step its batch.
"""
