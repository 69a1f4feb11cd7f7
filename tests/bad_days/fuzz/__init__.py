"""Random calls of handlers and ops: `python -m tests.bad_days.fuzz --minutes 5 --seed 0`."""
