"""Rules for a model of either framework; `linen` and `nnx` put them into practice, each
for its own.
"""

from ._by_framework import quantize
