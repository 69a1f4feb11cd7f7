"""An installed jaxfp8, seen from outside its checkout:
`python smoke.py native|reference [cpu|cuda]`.

The last argument says which modules there are to be.
"""

import subprocess
import sys

imported = subprocess.run(
    [sys.executable, "-c", "import jaxfp8"], capture_output=True, text=True, check=True
)
lines = (imported.stdout + imported.stderr).splitlines()
assert len(lines) <= 1, lines

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxfp8  # noqa: E402

wanted = sys.argv[1]
text = jax.jit(jaxfp8.ops.amax).lower(jnp.ones((4, 4))).as_text()
got = "native" if "jaxfp8_amax_v1" in text else "reference"
assert got == wanted, f"expected the {wanted} implementation, got {got}"

if len(sys.argv) > 2:
    assert jaxfp8.ops.has_cuda_kernels() == (sys.argv[2] == "cuda"), (
        f"has_cuda_kernels() is {jaxfp8.ops.has_cuda_kernels()}"
    )

x = np.linspace(-3, 3, 4096, dtype=np.float32)
data, amax = jaxfp8.ops.quantize(x, jnp.float32(100), jnp.float8_e4m3fn)
assert np.array_equal(
    np.asarray(data), np.clip(x * np.float32(100), -448, 448).astype(jnp.float8_e4m3fn)
)
assert amax == 3

layer = nn.Dense(8, dot_general_cls=jaxfp8.Fp8DotGeneral)
inputs = jax.random.normal(jax.random.key(0), (4, 16))
variables = layer.init(jax.random.key(1), inputs)
grads = jax.jit(jax.grad(lambda v: (layer.apply(v, inputs) ** 2).sum()))(variables)
state = grads[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"]
assert state["input_amax_history"][0] == jnp.abs(inputs).max()
print(
    f"smoke: jaxfp8 on Python {sys.version.split()[0]}, JAX {jax.__version__}: {got}, "
    "ok"
)
