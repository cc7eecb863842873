"""Numbers with their intervals: method by metric, beside what the papers print, and a run's file.

``number_format`` says how many digits a reader sees.
"""
