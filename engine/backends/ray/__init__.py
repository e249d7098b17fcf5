"""The driver and its workers as actors of Ray, on one node or on several.

Where to read first: `ray_pool`, the pool that gives the tasks of a phase to the workers, and finds workers that hang;
`worker_process`, the actor that runs them; `worker_handle`, a worker as the pool sees it, and its signs of life.
`scheduler` chooses the next tasks of a worker, `row_locations` says which node has which client states, and
`task_splitting` splits tasks where there are many workers. The data of the clients are Arrow tables in Ray's object
store (`arrow_columns`), and sums on the driver's node lie in shared memory (`shared_sums`). `driver_actor` runs the
rounds and is followed by the launcher, with `watch` over the processes. `connect`, `local_ray`, `start_obstacles` and
`placement` are about Ray itself: joining it, starting it, and reserving its resources.
"""

import logging
import os
import warnings
from contextlib import suppress

# Ray prints this for every process that ends in the middle of a call. A run tells by itself which worker it has lost.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")

# In a notebook without ipywidgets, Ray's import would advise to install them, and warn that there are no bars, of which
# none is shown.
logging.getLogger("ray.widgets").setLevel(logging.WARNING)
with warnings.catch_warnings(), suppress(ImportError):
    warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto  # noqa: F401
