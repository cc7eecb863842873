"""Fewer experts in a trained model: pruning and merging, by each expert's use."""
