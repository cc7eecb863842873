"""The laws of mixture-of-experts layers, and what they found in released libraries.

``laws`` and ``targets`` are what ``moecore conform`` and ``moecore.testing`` check; ``own_layers``
describes our layers to them. adapters/, findings/ and README.md are of other libraries.
"""
