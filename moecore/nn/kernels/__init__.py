"""How experts compute: products of rows, sorted by expert, with each expert's weights.

``grouped`` chooses among the ways (torch's grouped product, a loop over experts, groups of experts,
tiles); ``expert_parallel`` shares experts among ranks.
"""
