"""Clients' states in files, the table of rows, and checkpoints.

`row_files` reads and writes the rows, and `table` says which row is whose. `checkpoint_store` says what a checkpoint
consists of, `checkpoint` when a run writes one and which rows it pins, `copies` how it is copied to other machines, and
`sharing` how a fork gets rows. `retention` says where all that lies, and whether it can be used again.
"""
