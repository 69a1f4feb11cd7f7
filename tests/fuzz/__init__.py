"""Random calls of handlers and ops: `python -m tests.fuzz --minutes 5 --seed 0`."""
