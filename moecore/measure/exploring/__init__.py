"""Data of pages for exploration: experts of patches and words, and galleries of experts."""
