"""The experts of a layer, which compute in one module: a family of parts (see base.py)."""
