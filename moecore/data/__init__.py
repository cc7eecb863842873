"""Data sets: sources are read by ``prepare`` and written as prepared folders, which training opens.

``sources/`` has one file per kind of data, ``files/`` what sources of image files share, ``text/``,
``volumes/`` and ``phantom/`` what is particular to these. ``views/`` is what training sees of an
image, ``corruptions`` and ``image_noise`` what measurements do to one. ``prepared`` says what a
folder holds, ``layouts/`` write and open it, ``loader`` gives each step its batch.
"""
