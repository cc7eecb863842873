"""What a study found, for readers: the page, its tables and figures, and the claims' verdicts.

``results`` reads what the stages wrote into ``measured``; ``column`` says what is read from one
result, and ``measures`` has the columns and figures of each; ``texts`` lists all files to write.
"""
