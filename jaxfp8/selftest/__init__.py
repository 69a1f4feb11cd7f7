"""`python -m jaxfp8.selftest`: check and measure every op on this machine, and write one file for a bug report."""
