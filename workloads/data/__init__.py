"""The data sets that experiments choose by name: published ones, and the user's own files."""
