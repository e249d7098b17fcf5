"""The report of a study or a comparison: an interactive HTML page, Markdown with the same numbers, and text.

findings    the runs and what is reported of them
statistics  means, paired differences, costs of reaching a target
tables      tables of text, the same for all forms of the report
sensitivity grids of points over the settings
charts      the charts, the same for the page and for Markdown
markdown    the Markdown page
files       writes all files
"""
