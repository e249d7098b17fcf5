"""The report of a study or a comparison: an interactive HTML page, Markdown with the same numbers, and text.

findings    the runs and what is reported of them
statistics  means, paired differences, costs of reaching a target
tables      tables of text, the same for all forms of the report
heat        grids of points over the settings
interactive the content of the HTML page
charts      charts as SVG for the Markdown page, which markdown writes
page        writes all files
"""
