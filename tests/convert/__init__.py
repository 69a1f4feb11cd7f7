"""Tests of jaxfp8.convert: Flax's state, TransformerEngine's, and state for a changed model."""
