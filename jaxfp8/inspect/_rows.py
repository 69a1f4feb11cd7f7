"""Rows: a result that programs read as dicts, and people as a table."""

import dataclasses
from typing import Any

from .._jax._table import table


@dataclasses.dataclass(frozen=True, repr=False)
class Rows:
    """Rows of figures; `str` and `repr` are a table of them.

    A class of such rows has in `_table` what `table` takes after the rows.

    Attributes:
        rows: the rows.
    """

    rows: list[dict[str, Any]]

    def __repr__(self) -> str:
        return table(self.rows, *self._table)
