"""Layers of backbones: attention, the mixture-of-experts layer, patches and windows."""
