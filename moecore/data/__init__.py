"""Data sets: sources are read by ``prepare`` and written as prepared folders, which training opens.

``sources/`` one file per kind of data; ``files/`` the formats that they read; ``volumes/``,
``text/`` and ``phantom/`` what is particular to those; ``views/`` what training sees of an image;
``corruptions/`` what measurements do to one. ``prepared``: what a folder holds.
"""
