"""The bad days: what must go right in a run that goes wrong, row by row (README.md)."""
