"""Headers are read as safetensors' own library reads them, and damaged ones are refused."""

from __future__ import annotations

import io
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from vla_rl.contract.errors import ContractError
from vla_rl.fleet.registry import read_header

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.half": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
}


def test_places_are_those_of_the_formats_own_library(tmp_path):
    data = save(TENSORS, metadata={"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(data)
    head, places = read_header(io.BytesIO(data), len(data))
    assert {place.name for place in places} == set(TENSORS)
    begin = len(head)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        for place in places:
            assert (list(place.shape), place.dtype) == (
                file.get_slice(place.name).get_shape(),
                file.get_slice(place.name).get_dtype(),
            )
            raw = data[begin : begin + place.size]
            assert raw == TENSORS[place.name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            begin += place.size
    assert begin == len(data)


def file_of(header, content=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content


def entry(begin=0, end=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x08\0\0",
        file_of({}, length=1 << 60),
        file_of({}, length=3),
        file_of(b"[]"),
        file_of(b"{"),
        file_of(b"\xff\xff"),
        file_of(b"[" * 50_000),
        file_of({"a": entry()}),  # cut short
        file_of({"a": entry()}, bytes(9)),  # more than the tensors
        file_of({"a": entry(shape=(3,))}, bytes(8)),
        file_of({"a": entry(dtype="F9")}, bytes(8)),
        file_of({"a": entry(shape=(-2,), end=-8)}, bytes(8)),
        file_of({"a": entry(shape=(2.0,))}, bytes(8)),
        file_of({"a": entry(), "b": entry(4, 12)}, bytes(12)),  # overlap
        file_of({"a": entry(), "b": entry(12, 20)}, bytes(20)),  # gap
        file_of({"a": entry(4, 12)}, bytes(12)),
        file_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        file_of(b'{"a":%b,"a":%b}' % (json.dumps(entry()).encode(), json.dumps(entry(8, 16)).encode()), bytes(16)),
    ],
)
def test_a_damaged_file_is_refused(data):
    with pytest.raises(ContractError, match="not published"):
        read_header(io.BytesIO(data), len(data))


def test_no_more_is_read_than_there_is():
    class Watched(io.BytesIO):
        def read(self, size=-1):
            assert 0 <= size <= 10
            return super().read(size)

    data = file_of({}, length=11)
    with pytest.raises(ContractError, match="not published"):
        read_header(Watched(data), len(data))
