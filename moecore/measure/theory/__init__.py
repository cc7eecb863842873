"""Slopes and Lemma 1 of Puigcerver et al. (2022), measured on trained models."""
