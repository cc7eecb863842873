"""Models: routers, experts, layers and backbones, and the kernels with which experts compute.

``dispatch`` sends tokens to experts and back, ``predict`` runs a model over data,
``correspondence`` matches the tokens of two views or two models, ``router_hooks`` collects the
routing of any model, ``routing_traces`` encodes it as text, and ``meta_device`` builds models
without values.
"""
