"""Files of tensors that are put together here are those of safetensors' own `save`, to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from fedfleet.engine.storage.tensor_bytes import CODES, tensor_bytes


def tensors() -> dict[str, torch.Tensor]:
    found = {}
    for number, name in enumerate(sorted(CODES)):
        kind = getattr(torch, name)
        some = torch.arange(6).reshape(2, 3) % 2
        found[f"{number % 3} of {name}"] = some.to(kind)
        found[f"one {name}"] = torch.ones((), dtype=kind)
        found[f"none {name}"] = torch.zeros((0, 4), dtype=kind)
    return found


@pytest.mark.parametrize("metadata", [None, {"metric": 'a "quoted" µ'}])
def test_bytes_of_tensors(metadata):
    assert tensor_bytes(tensors(), metadata) == safetensors.torch.save(tensors(), metadata)


def test_bytes_of_arrays():
    arrays = {name: np.arange(6).reshape(3, 2).astype(name) for name in CODES if name in np.sctypeDict}
    assert len(arrays) == 13
    assert tensor_bytes(arrays) == safetensors.numpy.save(arrays)
    assert tensor_bytes({"a": np.arange(6, dtype=">i4")}) == tensor_bytes({"a": np.arange(6, dtype="<i4")})


def test_any_layout_is_written_row_by_row():
    transposed = torch.arange(6.0).reshape(2, 3).T
    read = safetensors.torch.load(tensor_bytes({"a": transposed, "b": torch.zeros(1).expand(4)}))
    assert torch.equal(read["a"], transposed)
    assert torch.equal(read["b"], torch.zeros(4))
    array = np.arange(6.0).reshape(2, 3).T
    assert (safetensors.numpy.load(tensor_bytes({"a": array}))["a"] == array).all()


def test_metadata_have_one_order():
    assert tensor_bytes({}, {"b": "2", "a": "1"}) == tensor_bytes({}, {"a": "1", "b": "2"})


def test_memory_that_is_not_there_is_an_error_and_not_the_end_of_the_process():
    """More is asked for than processes can address, which no setting of the system grants."""
    many = np.zeros(1 << 32, dtype=np.uint8)  # its pages are not touched
    with pytest.raises(MemoryError):
        tensor_bytes({str(number): many for number in range(40_000)})


def test_a_type_without_a_code_is_refused():
    with pytest.raises(ValueError, match="no code for numbers of type complex128"):
        tensor_bytes({"a": torch.zeros(2, dtype=torch.complex128)})
