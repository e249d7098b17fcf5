"""Partitions: which client has which rows of the training set."""
