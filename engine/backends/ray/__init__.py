"""Workers, nodes and the driver as actors of Ray."""

import os

# Ray prints this for every process that ends in the middle of a call. A run tells by itself which worker it has lost.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
