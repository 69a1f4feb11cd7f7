"""What a user reads and runs: pages, examples, the reference. `make types` checks
`usage.py`.
"""
