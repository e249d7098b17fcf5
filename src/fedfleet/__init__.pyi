from .engine.api import rounds as rounds
from .engine.backends.ray.connect import shutdown as shutdown
from .engine.config.schema import Checkpoint as Checkpoint
from .engine.config.schema import Engine as Engine
from .engine.config.schema import Evaluate as Evaluate
from .engine.config.schema import Experiment as Experiment
from .engine.config.schema import Federation as Federation
from .engine.config.schema import Local as Local
from .engine.config.schema import Tracking as Tracking
from .engine.config.schema import WorkerGroup as WorkerGroup
from .engine.errors import ConfigError as ConfigError
from .engine.errors import Diverged as Diverged
from .engine.errors import FedFleetError as FedFleetError
from .engine.errors import Interrupted as Interrupted
from .engine.records.history import Record as Record
from .engine.runs.observer import Observer as Observer
from .engine.runs.result import Result as Result
from .engine.runs.rounds import Rounds as Rounds
from .tune.comparison.data_frame import compare as compare
from .tune.files import load as load
from .tune.forking import fork as fork
from .tune.progress import Progress as Progress
from .tune.python_api import resume as resume
from .tune.python_api import run as run
from .tune.search.api import search as search
from .tune.search.found import Found as Found

__version__: str
