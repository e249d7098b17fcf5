"""The commands, one file each. `command` in a file is the command that has the file's name; `cli` lists them.

`run`, `resume`, `search` and `study` import torch in their functions, after they have started a process that imports
beside them: the one that writes to MLflow, or the one from which runs will be forked. `options` has what commands have
in common.
"""
