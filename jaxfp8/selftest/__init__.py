"""The parts of this machine, its active kernels, and `python -m jaxfp8.selftest`, which checks every op."""
