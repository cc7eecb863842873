"""Slopes, Lemma 1 and Theorems 1 and 2 of Puigcerver et al. (2022), measured."""
