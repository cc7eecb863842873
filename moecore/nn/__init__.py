"""Models: routers, experts, layers and backbones, and the kernels with which experts compute.

``dispatch`` sends tokens to experts and back, ``predict`` runs a model over data,
``correspondence`` matches the tokens of two views or two models, ``router_hooks`` collects the
routing of any model, ``routing_traces`` encodes it as text, and ``meta_device`` builds models
without values.

Shapes in all files: B or N images, C channels of H × W pixels, T tokens per image, E experts, k
chosen per token, d width of a token, K outputs.
"""
