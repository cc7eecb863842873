"""The page and the routing explorer: sections, their rows, the first sentence, and the templates.

``html`` puts the page together; ``view`` holds what the templates know.
"""
