"""Reduce the number of experts of a trained model by pruning and merging."""
