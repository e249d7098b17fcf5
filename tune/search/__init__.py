"""`search(data, folder)` finds the best values for the ranges in an experiment; docs/howto/search.md explains it."""

from .run import Found, search

__all__ = ["Found", "search"]
