"""Reports of a study: the page, its tables and figures, and the claims' verdicts.

``results`` reads the stages' files, ``column`` makes the columns of metrics, ``pictures`` has the
pictures of single measurements, and ``report_files`` lists all files to write.
"""
