"""The report's page and the routing explorer.

``report_page`` and ``explorer_page`` render them, ``sections`` writes the page's sentences and
sections, ``page_objects`` has the objects that the templates lay out.
"""
