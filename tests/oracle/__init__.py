"""The oracle: what every op and one delayed-scaling step must give, in numpy and
ml_dtypes alone.

It shares no code with the package and imports nothing of JAX, so a wrong rule cannot be
wrong in both places. The rules are those of docs/numerics.md, and `test_vectors.py`
compares it with the committed vectors of conformance/.

Convention: `scale` multiplies to quantize, `scale_inv = 1 / scale` to dequantize. A
*stored* scale is a `scale_inv`. Numpy keeps f32 subnormals (no flush to zero), which is
what the rules ask for.

This is the namespace of all rules; each file has those of one subject.
"""

from oracle.codec import *  # noqa: F403
from oracle.inputs import *  # noqa: F403
from oracle.layers import *  # noqa: F403
from oracle.producers import *  # noqa: F403
from oracle.products import *  # noqa: F403
from oracle.scaling import *  # noqa: F403
