"""What a frozen model knows: linear probes, simulated ageing and rescans, tissues and cubes."""
