"""What a study found, for readers: the page, its tables and figures, and the claims' verdicts.

``results`` reads what the stages wrote. ``metric_columns`` makes the columns of measurements that
declare metrics, and ``pictures`` draws what no chart shows of them; ``column`` and ``measures``
describe the other results. ``report_files`` lists all files to write.
"""
