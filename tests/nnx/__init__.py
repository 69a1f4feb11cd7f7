"""Tests of jaxfp8.nnx: layers, transforms, the training step, the bridge to Linen and
the example.
"""
