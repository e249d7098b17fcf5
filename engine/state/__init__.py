"""Clients' states in files, the table of rows, and checkpoints."""
