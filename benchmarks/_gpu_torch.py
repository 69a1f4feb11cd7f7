"""PyTorch's peers: `torch._scaled_mm`, and a compiled linear layer in FP8 with current
scaling.

PyTorch runs in the same process and in the same turns, on its own memory. Where it is
not installed, or sees no GPU, there are no such peers.
"""

import importlib.util

import jax
import numpy as np
from _gpu_timing import Candidate


def is_there() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _wait(result):
    import torch

    del result
    torch.cuda.synchronize()


def _codes(array):
    """Return an FP8 array of JAX as a tensor of PyTorch, through its bytes."""
    import torch

    formats = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
    bytes_of = jax.lax.bitcast_convert_type(array, np.uint8)
    return torch.from_dlpack(bytes_of).clone().view(formats[array.dtype.name])


def scaled_mm(pairs, scale_a, scale_b, fast: bool):
    """Make the candidate of `a @ b.T` for pairs of FP8 matrices, both K-major, to
    bfloat16.

    Returns:
        The candidate, and its first result as a numpy array.
    """
    import torch

    operands = [(_codes(a), _codes(b)) for a, b in pairs]
    scales = [
        torch.tensor(float(s), device="cuda", dtype=torch.float32)
        for s in (scale_a, scale_b)
    ]

    def one(a, b):
        return torch._scaled_mm(
            a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    first = one(*operands[0]).float().cpu().numpy()
    facts = {"gemms": {"fp8 torch._scaled_mm": 1}}
    return Candidate(
        lambda: [one(a, b) for a, b in operands], len(operands), facts, _wait
    ), first


def linear(m: int, k: int, n: int, fp8: bool) -> Candidate:
    """Make the candidate of forward and backward of `y = x @ w.T` through
    torch.compile.

    The weight is f32, x is bfloat16, and with `fp8` each tensor has one scale, from its
    own amax.
    """
    import torch

    fast_max, wide_max = 448.0, 57344.0

    def quantize(x, dtype, top):
        scale = top / x.abs().amax().float().clamp(min=1e-12)
        return (x.float() * scale).clamp(-top, top).to(dtype), 1 / scale

    def product(a, b_t, fast):
        """Return `a @ b_t.T` of two pairs (codes, scale_inv), both K-major."""
        return torch._scaled_mm(
            a[0],
            b_t[0].t(),
            a[1],
            b_t[1],
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    def turned(q):
        return q[0].t().contiguous(), q[1]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            of_x = quantize(x, torch.float8_e4m3fn, fast_max)
            of_weight = quantize(weight, torch.float8_e4m3fn, fast_max)
            context.save_for_backward(*of_x, *of_weight)
            return product(of_x, of_weight, True)

        @staticmethod
        def backward(context, grad):
            x, x_scale, weight, weight_scale = context.saved_tensors
            of_grad = quantize(grad, torch.float8_e5m2, wide_max)
            dx = product(of_grad, turned((weight, weight_scale)), False)
            dweight = product(turned(of_grad), turned((x, x_scale)), False)
            return dx, dweight.float()

    def forward(x, weight):
        return (
            Product.apply(x, weight)
            if fp8
            else torch.nn.functional.linear(x, weight.to(torch.bfloat16))
        )

    compiled = torch.compile(forward)
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).requires_grad_()
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

    def step():
        return torch.autograd.grad(compiled(x, weight), (x, weight), grad)

    exact = (grad.float().t() @ x.float()).detach()
    error = ((step()[1] - exact).norm() / exact.norm()).item()
    if not error < 0.1:
        raise AssertionError(
            f"torch linear: the weight's gradient is off by {error:.3f}"
        )
    return Candidate(
        step, 1, {"gemms": {"fp8 torch._scaled_mm" if fp8 else "bf16 torch": 3}}, _wait
    )
