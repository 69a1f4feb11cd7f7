"""Tests of the recipe `DelayedScaling` through plain `dot_general` and `nn.Dense`."""
