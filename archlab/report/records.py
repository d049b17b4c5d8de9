"""All records as one table that other tools read: CSV and Parquet, a row for each run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that a spreadsheet would run."""


def write(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write records.csv and records.parquet; returns them. An entry that a run lacks is empty."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    columns = {key: _one_type([record.get(key) for record in records]) for key in keys}
    files = [folder / "records.csv", folder / "records.parquet"]
    with files[0].open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(keys)
        table.writerows([as_text(value) for value in row] for row in zip(*columns.values(), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), files[1])
    return files


def as_text(value: Any) -> Any:
    """A cell of a CSV: a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _one_type(values: list[Any]) -> list[Any]:
    """A column has one type: whole numbers beside others become floats, whatever else is mixed becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1:
        return [None if value is None else str(value) for value in values]
    return values
