"""Kernels: products of rows, sorted by expert, with the weights of each expert.

``grouped`` chooses between torch's grouped_mm, ``cpu_expert_loop`` and tiles; ``expert_parallel``
shards experts over ranks.
"""
