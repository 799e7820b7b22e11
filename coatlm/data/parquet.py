"""Read a string column of a parquet file, one row group at a time, in bounded memory.

Rows may repeat a value of the column's dictionary page, so a page of 1 MB can expand to 1 TB.
Therefore the number of rows decoded together depends on the longest value of that page: together
they have at most `BATCH_BYTES`, or a single value. The total size of values outside the dictionary
is declared for the row group, and compared with `Limits.max_expansion` first. Pages are
decompressed whole; the format limits each to 2 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coatlm.config.urls import is_url
from coatlm.data.streams import Limits, open_input, quoted, some

ROWS = 64  # rows decoded at once
BATCH_BYTES = 64 << 20  # bytes decoded at once if rows repeat long values
READ_BYTES = 1 << 20  # bytes per read; by default pyarrow reads the whole column of a row group


def row_groups(path: str, nbytes: int) -> int:
    """The number of row groups in a file of `nbytes`. Raises ValueError if it is not parquet."""
    with _open(path, nbytes) as file:
        return int(file.metadata.num_row_groups)


def read_column(
    path: str, group: int, column: str, nbytes: int, limits: Limits
) -> Iterator[tuple[list[bytes | None], float]]:
    """Yield (UTF-8 values, their share of the rows) of a row group; the file has `nbytes`.

    Raises a one-line ValueError for a file, column or value that cannot be read.
    """
    import pyarrow

    most, total = limits.text_bytes(nbytes), 0
    with _open(path, nbytes) as file:
        kind = _string_type(path, file, column)
        rows = file.metadata.row_group(group).num_rows
        if _declared_bytes(file, group, column) > most:
            raise limits.expansion_error(path, nbytes)
        try:
            at_once = _rows_at_once(path, nbytes, group, column)
            for batch in file.iter_batches(at_once, row_groups=[group], columns=[column]):
                # as bytes, because pyarrow returns strings only if they are valid UTF-8
                values: list[bytes | None] = (
                    batch.column(0).cast(kind).cast(pyarrow.large_binary()).to_pylist()
                )
                total += sum(len(value) for value in values if value)
                if total > most:
                    raise limits.expansion_error(path, nbytes)
                if any(value and len(value) > limits.max_record for value in values):
                    raise limits.record_error(f"{path}: column {column!r}", "a value")
                yield values, len(values) / rows
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: broken parquet: {quoted(error)}") from None


def _open(path: str, nbytes: int, **options: Any) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: parquet needs pyarrow: pip install pyarrow") from None
    source: Any = open_input(path, nbytes) if is_url(path) else path
    try:
        return pyarrow.parquet.ParquetFile(source, buffer_size=READ_BYTES, **options)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file: {quoted(error)}") from None


def _string_type(path: str, file: Any, column: str) -> Any:
    """The type of the column. Raises ValueError unless it is a string type."""
    import pyarrow

    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path}: no column {column!r}; there are {some(names)}")
    if names.count(column) > 1:
        raise ValueError(f"{path}: {names.count(column)} columns have the name {column!r}")
    kind = file.schema_arrow.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ValueError(f"{path}: column {column!r} is {quoted(kind)}, not string")
    return kind


def _declared_bytes(file: Any, group: int, column: str) -> int:
    """The declared size of a column's decompressed pages."""
    row_group = file.metadata.row_group(group)
    parts = [row_group.column(i) for i in range(row_group.num_columns)]
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema == column)


def _rows_at_once(path: str, nbytes: int, group: int, column: str) -> int:
    """The number of rows of a row group to decode together.

    With `read_dictionary`, the first row comes with the whole dictionary page, without repeating
    its values.
    """
    import pyarrow
    import pyarrow.compute

    with _open(path, nbytes, read_dictionary=[column]) as file:
        for batch in file.iter_batches(1, row_groups=[group], columns=[column]):
            values = batch.column(0)
            if pyarrow.types.is_dictionary(values.type):
                lengths = pyarrow.compute.binary_length(
                    values.dictionary.cast(pyarrow.large_binary())
                )
                longest = pyarrow.compute.max(lengths).as_py() or 1
                return max(1, min(ROWS, BATCH_BYTES // longest))
    return ROWS
