"""`python -m jaxfp8.selftest`: whether every op is right on this machine, and how fast; one file for a bug report."""
