"""What this machine runs: its parts, its active kernels, and `python -m jaxfp8.selftest`, which checks every op."""
