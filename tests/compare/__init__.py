"""`python -m jaxfp8.compare`: what it prints and writes, and what makes it fair."""
