"""Reading parquet files of others, which take no more memory than their bytes explain, whatever their headers say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.contract.trust import check_memory
from vla_rl.experience.lerobot.features import Feature, fits

_BATCH_BYTES = 64 << 20
_MOST_PAGES = 1 << 20  # of a column in a row group
_I32, _BINARY, _STRUCT = 5, 8, 12  # of Thrift's compact protocol, in which the headers of pages are written
_WIDTHS = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of other types: truth values, bytes and doubles


class ParquetFile:
    """A file whose pages are checked before they are read.  Raises what pyarrow raises for one that is no parquet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Absolute: pyarrow takes a relative path with a colon for an address.
        self._file = pq.ParquetFile(path.absolute(), page_checksum_verification=True)
        self.schema, self.rows = self._file.schema_arrow, self._file.metadata.num_rows
        self.group_rows = [self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)]

    def read(self, columns: Sequence[str], groups: Sequence[int] | None = None) -> pa.Table:
        """The ``columns`` of those row ``groups``, of all by default.

        Raises ValueError where they would take far more memory than their bytes explain, before they are read; of text
        and pictures while they are, since one value may stand for many.
        """
        wanted = range(len(self.group_rows)) if groups is None else groups
        names = tuple(f"{name}." for name in columns)  # of columns with points in their names, too
        parts = [
            part
            for group in map(self._file.metadata.row_group, wanted)
            for part in map(group.column, range(group.num_columns))
            if f"{part.path_in_schema}.".startswith(names)
        ]
        disk = min(sum(part.total_compressed_size for part in parts), self._path.stat().st_size)
        check_memory(8 * max((part.num_values for part in parts), default=0), disk)
        text = [part.physical_type == "BYTE_ARRAY" for part in parts]
        sizes = self._sizes(parts)
        check_memory(max((max(size.page, 8 * size.values) for size in sizes), default=0), disk)
        texts = [size.bytes for size, is_text in zip(sizes, text, strict=True) if is_text]
        largest = max([8 * self._file.metadata.num_columns, *texts])
        check_memory(largest, disk)
        batches, taken = [], 0
        rows = max(1, min(_BATCH_BYTES // largest, 65_536)) if texts else 65_536
        for batch in self._file.iter_batches(rows, row_groups=list(wanted), columns=list(columns)):
            batches.append(batch)
            check_memory(taken := taken + batch.nbytes, disk)
        schema = pa.schema([field for field in self.schema if field.name in columns])
        return pa.Table.from_batches(batches, None if batches else schema)

    def _sizes(self, parts: Sequence[Any]) -> list[_Size]:
        """What the headers of the pages of each part say, which decide what is allocated: the footer may lie."""
        if not parts:
            return []
        with self._path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return [_size_of(data, part) for part in parts]


class WrongError(Exception):
    """A readable table with wrong content; the text begins with a verb."""

    def __init__(self, what: str, column: str = "") -> None:
        super().__init__(what)
        self.column = column


def require_type(found: pa.Schema, stored: str, feature: Feature, column: str = "") -> None:
    """Raise WrongError unless the column ``stored`` of a table is of ``feature``; ``column``: its name if another."""
    column = column or stored
    if stored not in found.names:
        raise WrongError("is missing", column)
    kind = found.field(stored).type
    if not fits(feature, kind):
        raise WrongError(f"is {kind} where {feature.dtype} {list(feature.shape)} is declared", column)


class _Size(NamedTuple):
    """In memory: the bytes of a column's largest page, and of all, and their values."""

    page: int
    bytes: int
    values: int


def _size_of(data: mmap, part: Any) -> _Size:
    first = part.dictionary_page_offset or part.data_page_offset
    begin = min(first, part.data_page_offset)
    page = size = values = 0
    for count, header in enumerate(_headers(data, begin, begin + part.total_compressed_size)):
        if count == _MOST_PAGES:
            raise ValueError(f"its column {part.path_in_schema!r} has more than {_MOST_PAGES:,} pages")
        page, size = max(page, header[2]), size + header[2]
        values += sum(header[kind].get(1, 0) for kind in (5, 7, 8) if kind in header)  # kinds of pages
    return _Size(page, size, values)


def _headers(data: mmap, at: int, end: int) -> Iterator[dict[int, Any]]:
    """The headers of pages from ``at`` on (PageHeader of parquet.thrift): 2 and 3 are its bytes, in memory and here."""
    while at < end:
        try:
            header, at = _struct(data, at, 4)
            stored = header[3]
            if min(stored, header[2]) < 0:
                raise ValueError("a negative size")
        except (IndexError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"the header of a page is damaged ({type(error).__name__}: {error})") from error
        yield header
        at += stored


def _struct(data: mmap, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """{field: number or struct} and where it ends."""
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        step, kind, at = head >> 4, head & 15, at + 1
        if step:
            field += step
        else:
            number, at = _varint(data, at)
            field = _signed(number)
        if kind == _STRUCT and depth:
            found[field], at = _struct(data, at, depth - 1)
        elif kind in (4, _I32, 6):
            number, at = _varint(data, at)
            if kind == _I32:
                found[field] = _signed(number)
        elif kind == _BINARY:
            number, at = _varint(data, at)
            at += number
        else:
            at += _WIDTHS[kind]
    return found, at + 1


def _varint(data: mmap, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _signed(number: int) -> int:
    return (number >> 1) ^ -(number & 1)
