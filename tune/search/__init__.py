"""`search(data, folder)`: find the best values for an experiment's ranges. docs/search.md has the whole story."""

from .run import Found, search

__all__ = ["Found", "search"]
