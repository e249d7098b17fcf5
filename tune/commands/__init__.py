"""The commands, one file each. `command` in a file is the command that has the file's name; `cli` lists them.

`run`, `resume`, `search` and `study` are quick to import, because they start the process from which their workers will
be forked before they import torch themselves. `options` has what commands have in common.
"""
