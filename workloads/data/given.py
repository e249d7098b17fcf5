"""Tables that Python has: a DataFrame, a `datasets.Dataset`, arrays or tensors.

They are written once, to a Parquet file in the cache whose name is a digest of its content, so that the configuration
of a run is plain data that names them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from ..files.cache import cache_folder
from .forms import GIVEN

INPUT, LABEL = "input", "label"
"""The columns of a pair of arrays."""


def table(data: Any, *, test: Any = None, **arguments: Any) -> dict[str, Any]:
    """The workload `table` for data that Python has, as plain data for `fedfleet.Experiment`.

        fedfleet.Experiment(workload=fedfleet.table(frame, label="price", test_fraction=0.2), …)

    data: a DataFrame of pandas or polars, a `datasets.Dataset` or a DatasetDict with the parts train and test, an Arrow
    table, a TensorDataset, a pair (inputs, labels) of arrays or tensors, or a mapping from the names of columns to
    arrays, with one row for each example. test: the same for the test rows; without it, give `test_fraction` or
    `split_column`. arguments: the other arguments of the workload, see `fedfleet list workloads table`.

    The rows are written to a Parquet file in the cache ($FEDFLEET_CACHE), which the result names; the same rows give
    the same file. Raises TypeError for anything else.
    """
    if isinstance(data, Mapping) and "train" in data and not is_array(data["train"]):
        if test is None and "test" in data:
            test = data["test"]
        data = data["train"]
    found = {"name": "table", "path": kept(as_arrow(data)), **arguments}
    return found if test is None else {**found, "test": test if isinstance(test, str) else kept(as_arrow(test))}


def as_arrow(data: Any) -> Any:
    """The rows as an Arrow table. Raises TypeError for what is none."""
    if isinstance(data, pa.Table):
        return data
    if hasattr(data, "with_format") and hasattr(data, "features"):
        if not hasattr(data, "num_rows"):
            raise TypeError(refusal(data, "datasets.Dataset.from_list(list(data))"))
        return data.with_format("arrow")[:].replace_schema_metadata(data.data.schema.metadata)
    if type(data).__module__.startswith("pandas."):
        return pa.Table.from_pandas(data, preserve_index=False)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.table(data)
    tensors = getattr(data, "tensors", data)  # of a TensorDataset
    if isinstance(tensors, tuple | list) and len(tensors) == 2 and all(map(is_array, tensors)):
        tensors = dict(zip((INPUT, LABEL), tensors, strict=True))
    if isinstance(tensors, Mapping) and tensors and all(map(is_array, tensors.values())):
        return pa.table({str(name): column_of(values) for name, values in tensors.items()})
    raise TypeError(refusal(data, "fedfleet.table((torch.stack(inputs), torch.tensor(labels)))"))


def refusal(data: Any, line: str) -> str:
    return (
        "data must be a DataFrame, a datasets.Dataset, an Arrow table, a TensorDataset, a pair of arrays or a mapping "
        f"from names to arrays, got {type(data).__name__}; write {line}"
    )


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor with rows, or a list."""
    return isinstance(value, list) or (hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0)


def column_of(values: Any) -> Any:
    """An Arrow array with a cell for each row of an array or tensor, which is a tensor itself if it has several
    numbers."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, list) or values.dtype == object or values.ndim == 1:
        return pa.array(values)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))


def kept(rows: Any) -> str:
    """The path of the Parquet file with these rows, which is written unless it is there."""
    folder = cache_folder() / GIVEN
    folder.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=".", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            parquet.write_table(rows, file, use_dictionary=False)
        target = folder / f"{content_of(Path(beside))}.parquet"
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise
    return str(target)


def content_of(path: Path) -> str:
    """32 hexadecimal digits of a file's content."""
    whole = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            whole.update(block)
    return whole.hexdigest()
