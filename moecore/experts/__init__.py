from moecore.experts.mlp import Mlp

Experts = Mlp
