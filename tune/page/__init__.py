"""A report as one interactive HTML page, which needs no network: what is on it, and how it is written.

content  the parts of a page: sections with tables, charts and maps of colours
style    colours, markers and lines
html     writes a page: the template page.html.j2 with page.css, charts.js and the library in plotly/
svg      the same charts as SVG, for Markdown
"""
