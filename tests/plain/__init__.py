"""Plain functions: jaxfp8 without a Flax layer around it, in Equinox, in Haiku and in JAX alone."""
