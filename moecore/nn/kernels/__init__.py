"""Kernels: products of rows, sorted by expert, with the weights of each expert."""
