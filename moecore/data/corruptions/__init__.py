"""The fifteen corruptions of test images, by family, and how strong each is."""
