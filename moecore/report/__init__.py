"""What a study found, for readers: the page, its tables and figures, and the claims' verdicts.

``results`` reads what the stages wrote. ``column`` makes the columns of the metrics, and
``pictures`` draws what no chart shows of them. ``report_files`` lists all files to write.
"""
