"""Data sets, models and problems, and how rows are dealt to clients.

Where to read first: `workload`, what the engine asks of a workload; `classification`, which most data sets use. `data`
has a file for each data set, `files` reads users' own files, `models` the networks, `partitions` how rows are dealt,
`problems` formulas without data, `wrappers` what changes a workload. `table` has all names.
"""

import sys

from .files.vision import BeforeTorchvision

if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, BeforeTorchvision())
