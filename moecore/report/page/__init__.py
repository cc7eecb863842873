"""The page and the routing explorer: sections, their rows, the first sentence, and the templates.

``report_page`` puts the page together; ``view`` holds what the templates know.
"""
