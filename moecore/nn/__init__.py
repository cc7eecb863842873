"""Models: routers, experts, layers and backbones, and the kernels with which experts compute.

Beside them ``dispatch`` takes tokens to experts and back, ``predict`` runs a model over data, and
``correspondence`` matches the tokens of two views or of two models.
"""
