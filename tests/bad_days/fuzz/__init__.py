"""Random calls of handlers and ops: `pytest -n 2 tests/bad_days/fuzz --fuzz 0:15000`."""
