"""Kernels: multiply rows, sorted by expert, by the weights of their expert."""
