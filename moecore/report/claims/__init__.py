"""Claims and questions: tests of a difference, verdicts, and their tables.

``significance`` and ``evaluation`` decide those of a study, ``claims_table`` prints them,
``records`` says what a result keeps of them; ``answers`` has those of all studies, and ``pages``
joins these with what the papers print.
"""
