"""The tissues that region experts are named after."""

TISSUES = {"wm": "White matter", "gm": "Grey matter", "csf": "CSF"}
CONTROL = "random_"  # before a tissue's name: random masks of its size
