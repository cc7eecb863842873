"""Models: routers, experts, layers and backbones, and the kernels with which experts compute."""
