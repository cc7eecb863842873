"""Claims and questions: tests, verdicts and their tables.

``significance`` and ``evaluation`` judge the claims of a study, ``claims_table`` prints them, and
``result_evidence`` stores their items and dates. ``answers`` judges the claims of all studies.
"""
