"""The pages of docs/results: `python -m tools.reproductions` writes README.md, the pages of topics, and the tables of
pages whose sentences are written by hand.

Every number comes from `cells.jsonl` in a folder of docs/results or, if it is published, from docs/results/papers/ or
the file of a topic. Titles, commands and remarks come from docs/results/reproductions.yaml, and tables.yaml beside it
says what the tables of the other pages show.
"""
