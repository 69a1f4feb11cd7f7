"""The simulation: what a program must give, by numpy loops and a backward pass written by hand. Imports nothing of JAX.

Every use of a state in a step reads the same history and scale. The next state is the history rolled by one, with the
max of the amaxes of all uses in slot 0; a state that no branch that ran has used stays as it is (all zeros come back).

Why results are bitwise, whatever order sums are taken in:

- `snap` follows each product: `clip(round(y / 8), -7, 7)` forward, and the same function of the gradient backward. So
  x and grad are integers of at most 7 in every product, however long the chain is (a product of random such matrices
  is 8 times as large, roughly). Kernels are such integers times 1/4, 1/2 or 1.
- A scale is `FP8_MAX / a`, with `a` in [1/4, 14] the largest entry of the history. The smallest nonzero code is at
  least 448 / 14 * 1/4 = 8 forward, a multiple of 1 (e4m3 has 4 significant bits), and the largest 448. Backward the
  smallest is 57344 / 14 = 4096, a multiple of 1024 (3 bits), and the largest 57344. Without a history the scale is 1
  and codes are the values themselves.
- So a product of codes is a multiple of 1 below 2**18 (fprop) or of 1024 below 2**25 (dgrad, wgrad), and a sum of 16 of
  them has at most 22 significant bits: f32 holds it exactly. `Sums` checks that of every product.
- Scaling a sum is one f32 multiplication, and the cast to the dtype of the operand one rounding, both elementwise.
- Left is the sum of a kernel's gradient over its uses. With the "power_of_two" algorithm scales are powers of two, the
  terms multiples of one unit, and the sum exact. With "max" it has a bound: `Total`.
"""

import dataclasses

import numpy as np
import oracle

from transforms import programs as p

SNAP_RANGE = 7
_UNITS = 7 * 2.0 ** np.arange(-8, 9)


def power_of_two(history):
    """The least `7 * 2**i` that the history does not exceed, so that `448 / a` and `57344 / a` are powers of two."""
    largest = history.max()
    return _UNITS[_UNITS >= largest].min() if largest > 0 else np.float32(0)


ALGORITHMS = {"max": "max", "power_of_two": power_of_two}


def snap(y):
    """The nonlinearity behind each product, and its pullback; exact but for the one rounding to an integer."""
    return np.clip(np.rint(oracle.widen(y) / 8), -SNAP_RANGE, SNAP_RANGE).astype(y.dtype)


def unit(values) -> float:
    """The largest power of two that divides all values; infinity where there are only zeros."""
    values = np.asarray(values, np.float64)
    mantissas, exponents = np.frexp(values[values != 0])
    integers = (mantissas * 2.0**53).astype(np.int64)
    return float(np.ldexp((integers & -integers).astype(np.float64), exponents - 53).min(initial=np.inf))


@dataclasses.dataclass(frozen=True)
class Sums:
    """A product of codes: the sums in f64, the sums of magnitudes, a power of two that divides every term."""

    value: np.ndarray
    magnitude: np.ndarray
    unit: float

    @staticmethod
    def of(a, b) -> "Sums":
        """a @ b; an AssertionError where some order of f32 additions could round."""
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        sums = Sums(a @ b, np.abs(a) @ np.abs(b), unit(a) * unit(b))
        assert sums.magnitude.max() <= 2.0**24 * sums.unit, "the program leaves the range of exact sums"
        return sums

    def scaled(self, scale_inv, dtype) -> np.ndarray:
        """As the package: one multiplication in f32, one cast."""
        return (self.value.astype(np.float32) * scale_inv).astype(dtype)


@dataclasses.dataclass
class Total:
    """A kernel's gradient over all uses: the exact sum in f64, and what bounds the error of f32 sums of it."""

    value: np.ndarray | float = 0.0
    magnitude: np.ndarray | float = 0.0
    unit: float = np.inf
    roundings: int = 0

    def add(self, sums: Sums, scale_inv, terms: int):
        """Adds a product of `terms` products of codes each, times scale_inv; 24 + 24 bits, exact in f64."""
        scale = np.float64(scale_inv)
        self.value = self.value + sums.value * scale
        self.magnitude = self.magnitude + sums.magnitude * scale
        self.unit = min(self.unit, sums.unit * unit(scale))
        self.roundings += terms + 1

    def bound(self):
        """0 where every term is a multiple of one unit and every order of f32 additions exact.

        Otherwise each use rounds at most once for its scaling and, however a transformation merges the uses into fewer
        products, once for every addition of a term; `magnitude` bounds each partial sum. The last factor covers the
        higher orders.
        """
        if np.max(self.magnitude) <= 2.0**24 * self.unit:
            return np.zeros_like(self.magnitude)
        return self.roundings * 2.0**-24 * self.magnitude * (1 + 2.0**-10)


class Simulation:
    """One step of a program.

    Args:
        kernels: for each layer f32 `[WIDTH, WIDTH]`, or `[MEMBERS, WIDTH, WIDTH]` where stacked.
        states: for each layer a list of `oracle.LayerState`: one, or one a member where stacked.
        algorithm: a name in ALGORITHMS.

    Attributes:
        kernel_gradients: for each layer, for each (stacked) kernel of it, a Total.
    """

    def __init__(self, kernels, states, algorithm):
        self.kernels, self.states = kernels, states
        self.options = oracle.Options(amax_compute_algo=ALGORITHMS[algorithm])
        self.kernel_gradients = [[Total() for _ in range(p.MEMBERS)] for _ in p.LAYERS]
        self._uses = {}

    def gradient(self, body, x, grad):
        """(y, gradient of x): x in its dtype, grad that of y."""
        y, pullback = self._run(body, x, member=0, index=0)
        return y, pullback(grad)

    def next_states(self):
        """As `states`; None where a state was not used."""
        return [[self._next(i, row) for row in range(len(rows))] for i, rows in enumerate(self.states)]

    def _next(self, layer, row):
        if (layer, row) not in self._uses:
            return None
        parts = []
        for name, uses in self._uses[layer, row].items():
            scales, amaxes = zip(*uses, strict=True)
            assert len(set(scales)) == 1, f"uses of one state in one step disagree about the scale: {scales}"
            parts.append(oracle.next_state(getattr(self.states[layer][row], name), scales[0], max(amaxes)))
        return oracle.LayerState(*parts)

    def _quantize(self, layer, row, name, value, fmt):
        """(codes, scale_inv), and the use recorded."""
        codes, scale, _ = oracle.step(value, getattr(self.states[layer][row], name), fmt, self.options)
        uses = self._uses.setdefault((layer, row), {"input": [], "kernel": [], "output_grad": []})
        uses[name].append((scale, oracle.amax(value)))
        return codes, np.float32(1) / scale

    # ------------------------------------------------------------- nodes: each returns its result and a pullback

    def _run(self, node, x, member, index):
        match node:
            case p.Call():
                return self._call(node.layer, x, member)
            case p.Jit() | p.Remat():
                return self._run(node.body, x, member, index)
            case p.Cond():
                taken = index % 2 == 1 if node.predicate == "odd" else node.predicate
                return self._run(node.then if taken else node.otherwise, x, member, index)
            case p.Sequence():
                return self._chain([(part, member, index) for part in node.parts], x)
            case p.Scan():
                return self._chain([(node.body, i if node.members else member, i) for i in range(node.length)], x)
            case p.Map() | p.Vmap():
                return self._split(node, x, member, index)
        raise TypeError(f"not a node: {node!r}")

    def _chain(self, runs, x):
        pullbacks = []
        for body, member, index in runs:
            x, pullback = self._run(body, x, member, index)
            pullbacks.append(pullback)

        def backward(grad):
            for pullback in reversed(pullbacks):
                grad = pullback(grad)
            return grad

        return x, backward

    def _split(self, node, x, member, index):
        groups = np.split(x, p.MEMBERS)
        # A Map is a loop and has an index of its own; a Vmap has none.
        indices = range(p.MEMBERS) if isinstance(node, p.Map) else [index] * p.MEMBERS
        runs = [
            self._run(node.body, group, i if node.members else member, index)
            for i, (group, index) in enumerate(zip(groups, indices, strict=True))
        ]

        def backward(grad):
            parts = np.split(grad, p.MEMBERS)
            return np.concatenate([pullback(part) for (_, pullback), part in zip(runs, parts, strict=True)])

        return np.concatenate([y for y, _ in runs]), backward

    def _call(self, layer, x, member):
        row = member if p.LAYERS[layer].stacked_state else 0
        column = member if p.LAYERS[layer].stacked_kernel else 0
        kernel = self.kernels[layer][column] if p.LAYERS[layer].stacked_kernel else self.kernels[layer]
        x_codes, x_inv = self._quantize(layer, row, "input", x, oracle.E4M3)
        kernel_codes, kernel_inv = self._quantize(layer, row, "kernel", kernel, oracle.E4M3)
        y = Sums.of(x_codes, kernel_codes).scaled(x_inv * kernel_inv, x.dtype)

        def backward(grad):
            grad_codes, grad_inv = self._quantize(layer, row, "output_grad", snap(grad), oracle.E5M2)
            dkernel = Sums.of(x_codes.T, grad_codes)
            self.kernel_gradients[layer][column].add(dkernel, x_inv * grad_inv, terms=len(x))
            return Sums.of(grad_codes, kernel_codes.T).scaled(grad_inv * kernel_inv, x.dtype)

        return snap(y), backward
