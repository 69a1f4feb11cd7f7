"""The parts of this machine that jaxfp8 uses, its active kernels, and `python -m jaxfp8.selftest`, which checks every op."""
