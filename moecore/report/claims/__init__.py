"""Claims and questions: tests of a difference, verdicts, and their tables.

``evaluation`` decides those of a study; ``all_claims`` joins those of all studies with what the
papers print, for docs/claims.md.
"""
