"""Tests of jaxfp8.convert: Flax's state, and state for a changed model."""
