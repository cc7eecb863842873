from moecore.routers.noisy_top_k import NoisyTopK

Router = NoisyTopK
