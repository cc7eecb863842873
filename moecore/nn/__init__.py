"""Models: routers, experts, layers and backbones, and the kernels with which experts compute.

``dispatch`` takes tokens to experts and back, ``predict`` runs a model over data, and
``correspondence`` matches the tokens of two views or of two models. ``router_hooks`` collects the
routing of any model, ``routing_traces`` writes it as text, ``meta_device`` builds without values.
"""
