"""Products as plain functions: jaxfp8 without a Flax layer around it."""
