"""Fewer experts out of a trained model: what each does, and how many stay; pruning and merging."""
