"""The page of reproductions: `python -m tools.reproductions` writes docs/results/README.md.

Every number of the page comes from `cells.jsonl` in a folder of docs/results or, if it is published, from
docs/results/papers/. Titles, commands and remarks come from docs/results/reproductions.yaml.
"""
