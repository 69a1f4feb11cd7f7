"""Random calls of the handlers: `pytest -n 2 tests/bad_days/fuzz --fuzz 0:15000`."""
