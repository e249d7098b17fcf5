"""`search(data, folder)` finds the best values for the ranges in an experiment; docs/search.md explains all of it."""

from .run import Found, search

__all__ = ["Found", "search"]
