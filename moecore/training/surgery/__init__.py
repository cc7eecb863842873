"""Fewer experts out of a trained model: what each does (``expert_use``), pruning and merging."""
