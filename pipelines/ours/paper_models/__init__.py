"""Models of the papers' sizes, counted beside the printed numbers; a part of sizes.yaml."""
