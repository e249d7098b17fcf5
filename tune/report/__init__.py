"""The report of a study: an HTML page that needs no network, Markdown with the same numbers, and text.

findings    the runs and what is reported of them
statistics  means, paired differences, costs of reaching a target
tables      tables of text, the same for all forms of the report
charts      charts as SVG; heat: charts of the settings
html        the HTML page; markdown: the Markdown page
page        writes all files
"""
