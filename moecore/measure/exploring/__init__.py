"""What pages let a reader look at: experts of patches and words, and each expert's favourites."""
