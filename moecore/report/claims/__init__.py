"""Claims and questions: tests, verdicts and their tables.

``significance`` and ``evaluation`` judge the claims of a study, ``claims_table`` prints them, and
``items_and_dates`` stores their items and dates. ``answers`` judges the claims of all studies.
"""
