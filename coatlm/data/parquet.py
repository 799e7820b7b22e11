"""One column of strings of a parquet file, a row group at a time, in bounded memory.

Rows may repeat a value of the column's dictionary page, so that a page of 1 MB can stand for 1 TB.
Therefore the longest value of that page decides how many rows are decoded together: at most
`BATCH_BYTES`, or one value. Outside the dictionary, values are as long as what the column declares
for the row group, which is compared with `Limits.max_expansion` first. Pages are decompressed
whole; the format allows 2 GiB for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coatlm.data.streams import Limits, quoted, some

ROWS = 64  # decoded at once
BATCH_BYTES = 64 << 20  # decoded at once where rows repeat long values
READ_BYTES = 1 << 20  # read at once; without it pyarrow reads a row group's column whole


def row_groups(path: str) -> int:
    """How many row groups a file has. Raises ValueError where it is not parquet."""
    with _open(path) as file:
        return int(file.metadata.num_row_groups)


def read_column(
    path: str, group: int, column: str, nbytes: int, limits: Limits
) -> Iterator[tuple[list[bytes | None], float]]:
    """(values as UTF-8, their share of the rows) of a row group of a file of `nbytes`.

    Raises ValueError in one line for a file, column or value that cannot be read.
    """
    import pyarrow

    most, total = limits.text_bytes(nbytes), 0
    with _open(path) as file:
        kind = _string_type(path, file, column)
        rows = file.metadata.row_group(group).num_rows
        if _declared_bytes(file, group, column) > most:
            raise limits.expansion_error(path, nbytes)
        try:
            at_once = _rows_at_once(path, group, column)
            for batch in file.iter_batches(at_once, row_groups=[group], columns=[column]):
                # as bytes, because pyarrow hands out strings only if they are valid UTF-8
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


def _open(path: str, **options: Any) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: parquet needs pyarrow: pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES, **options)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file: {quoted(error)}") from None


def _string_type(path: str, file: Any, column: str) -> Any:
    """The column's type, which must be one of strings."""
    import pyarrow

    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path}: no column {column!r}; there are {some(names)}")
    kind = file.schema_arrow.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ValueError(f"{path}: column {column!r} is {quoted(kind)}, not string")
    return kind


def _declared_bytes(file: Any, group: int, column: str) -> int:
    """What the pages of a column are said to take when they are decompressed."""
    row_group = file.metadata.row_group(group)
    parts = [row_group.column(i) for i in range(row_group.num_columns)]
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema == column)


def _rows_at_once(path: str, group: int, column: str) -> int:
    """Rows of a row group that are decoded together.

    With `read_dictionary` the first row comes with the whole dictionary page, and values of the
    page are not repeated.
    """
    import pyarrow
    import pyarrow.compute

    with _open(path, read_dictionary=[column]) as file:
        for batch in file.iter_batches(1, row_groups=[group], columns=[column]):
            values = batch.column(0)
            if pyarrow.types.is_dictionary(values.type):
                lengths = pyarrow.compute.binary_length(
                    values.dictionary.cast(pyarrow.large_binary())
                )
                longest = pyarrow.compute.max(lengths).as_py() or 1
                return max(1, min(ROWS, BATCH_BYTES // longest))
    return ROWS
