"""Clients' states in files, the table of rows, and checkpoints.

row_files         rows of client states in files; sharing: how a fork gets them
resident_rows     rows that stay in the memory of a device between rounds
row_table         which row is whose
checkpoint_store  what a checkpoint holds, and the content-addressed store of all of them, here and elsewhere
checkpoint        when a run writes one, and which rows it pins
copies            copies on other machines, which hold the rows too
folders           where all that lies, from its making to its removal
"""
