"""Theorems 1 and 2 of Puigcerver et al. (2022) on linear experts; a part of lipschitz.yaml."""
