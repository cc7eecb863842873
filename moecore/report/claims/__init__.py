"""Claims and questions: tests of a difference, verdicts, and their tables.

``evaluation`` decides those of a study; ``claims_page`` joins those of all studies with what the
papers print, for docs/claims.md.
"""
