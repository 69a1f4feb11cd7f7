"""Tests that run once for each row of a table."""

import pytest


def each_row(names, table):
    """Parametrize by the values of a dict, whose keys are the ids."""
    return pytest.mark.parametrize(names, table.values(), ids=table)
