"""Recipes and what each must give: a whole product, forward and backward, in numpy and
ml_dtypes.

A product is the matrices x `[m, k]`, kernel `[n, k]` and grad `[m, n]`. Each is
quantized along what the product that reads it contracts, so twice, by a `Rule` that
knows nothing of the package.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import oracle
from oracle import BF16, E4M3, E5M2, F16, F32, Format, blocks as oracle_blocks

import jaxfp8

MATMUL = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a recipe scales: `tile` for x and grad, `square` for the kernel if that has
    others; None is the tensor.
    """

    tile: tuple | None = None
    square: tuple | None = None
    forward: Format = E4M3
    backward: Format = E5M2
    scale: str = "f32"
    rounding: str = "ceil"
    power_2_scale: bool = False
    # of x, kernel and grad, in place of their amaxes
    bounds: tuple = (None, None, None)

    is_plain: bool = False  # whether tensors stay as they are

    def quantize(self, x, block, fmt, bound=None):
        """`Codes` of matrices `[batch, rows, cols]`; one scale for a whole tensor is
        that of all of them.
        """
        if self.is_plain:
            return Codes(x, None, None)
        if block is None:
            sf, scale_inv = oracle.scale_pair(
                oracle.amax(x) if bound is None else F32(bound), 1, fmt.max
            )
            if self.power_2_scale:
                sf = F32(np.ldexp(0.5, np.frexp(sf)[1]))
                scale_inv = F32(1 / np.float64(sf))
            return Codes(
                oracle.quantize(x, sf, fmt)[0],
                np.broadcast_to(scale_inv, (len(x), 1)),
                None,
            )
        options = {
            "scale": self.scale,
            "rounding": self.rounding,
            "power_2_scale": self.power_2_scale,
        }
        codes, scales = zip(
            *(oracle_blocks.quantize(one, fmt, block, **options) for one in x),
            strict=True,
        )
        return Codes(np.stack(codes), np.stack(scales), block)


@dataclasses.dataclass(frozen=True)
class ByProduct:
    """A rule for each product."""

    fprop: Rule
    dgrad: Rule
    wgrad: Rule


@dataclasses.dataclass(frozen=True)
class Codes:
    """Matrices of codes `[batch, rows, contract]` and their scales."""

    codes: np.ndarray
    scales: np.ndarray | None  # None for matrices that stay as they are
    block: tuple | None

    def by(self, other: "Codes", out_dtype, bias=None) -> oracle.Product:
        """`self @ other.T` of each pair of matrices."""
        if self.scales is None and other.scales is None:
            # They multiply in the dtype of the result, but not in a wider one than
            # theirs.
            one = np.ones((len(self.codes), 1), F32)
            widest = np.promote_types(self.codes.dtype, other.codes.dtype)
            dtype = (
                out_dtype if np.promote_types(widest, out_dtype) == widest else widest
            )
            a, b = (
                Codes(matrices.codes.astype(dtype), one, None)
                for matrices in (self, other)
            )
            return a.by(b, out_dtype, bias)
        biases = [None] * len(self.codes) if bias is None else bias
        blocks = {"a_block": self.block, "b_block": other.block, "out_dtype": out_dtype}
        parts = zip(
            self.codes, other.codes, self.scales, other.scales, biases, strict=True
        )
        made = [
            oracle_blocks.matmul(a, b, s, t, bias=bias, **blocks)
            for a, b, s, t, bias in parts
        ]
        return oracle.Product(
            *(
                np.stack([getattr(one, name) for one in made])
                for name in ("exact", "bound")
            )
        )


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of a whole product."""

    y: oracle.Product
    dx: oracle.Product
    dkernel: oracle.Product


def step(
    rule: Rule, x, kernel, grad, *, bias=None, x_dtype=F32, kernel_dtype=F32
) -> Step:
    """`y = x @ kernel.T + bias` of x `[batch, m, k]`, kernel `[batch, n, k]`, grad
    `[batch, m, n]`, in grad's dtype.
    """
    if isinstance(rule, ByProduct):
        options = {"bias": bias, "x_dtype": x_dtype, "kernel_dtype": kernel_dtype}
        fprop, dgrad, wgrad = (
            step(part, x, kernel, grad, **options)
            for part in (rule.fprop, rule.dgrad, rule.wgrad)
        )
        return Step(fprop.y, dgrad.dx, wgrad.dkernel)
    square = rule.square or rule.tile
    of_x, of_kernel, of_grad = rule.bounds
    x_last, x_first = (
        rule.quantize(of, rule.tile, rule.forward, of_x) for of in (x, x.swapaxes(1, 2))
    )
    k_last, k_first = (
        rule.quantize(of, square, rule.forward, of_kernel)
        for of in (kernel, kernel.swapaxes(1, 2))
    )
    g_rows, g_cols = (
        rule.quantize(of, rule.tile, rule.backward, of_grad)
        for of in (grad, grad.swapaxes(1, 2))
    )
    return Step(
        y=x_last.by(
            k_last, grad.dtype, None if bias is None else bias.astype(grad.dtype)
        ),
        dx=g_rows.by(k_first, x_dtype),
        dkernel=g_cols.by(x_first, kernel_dtype),
    )


PLAIN, CURRENT, ROWWISE = Rule(is_plain=True), Rule(), Rule((1, None))
BLOCK = Rule((1, 128), (128, 128), backward=E4M3)
MX = Rule((1, 32), backward=E4M3, scale="e8m0")


def _with(rule, **fields):
    return dataclasses.replace(rule, **fields)


_E4M3 = {"backward": E4M3}
_HYBRID = {"backward": E5M2}
_E5M2 = {"forward": E5M2, "backward": E5M2}
# name -> (recipe, rule)
RECIPES = {
    "current": (jaxfp8.Float8CurrentScaling(), CURRENT),
    "current e4m3": (
        jaxfp8.Float8CurrentScaling(jaxfp8.Format.E4M3),
        _with(CURRENT, **_E4M3),
    ),
    "current power_2": (
        jaxfp8.Float8CurrentScaling(power_2_scale=True),
        _with(CURRENT, power_2_scale=True),
    ),
    "static": (jaxfp8.StaticScaling(), _with(CURRENT, bounds=(224.0, 224.0, None))),
    # Bounds that saturate, that are no powers of two, and one whose scale is the
    # largest there is.
    "static e4m3": (
        jaxfp8.StaticScaling(1.3, 1e-37, 0.07, jaxfp8.Format.E4M3),
        _with(CURRENT, bounds=(1.3, 1e-37, 0.07), **_E4M3),
    ),
    "rowwise": (jaxfp8.Float8RowwiseScaling(), ROWWISE),
    "rowwise e4m3 power_2": (
        jaxfp8.Float8RowwiseScaling(jaxfp8.Format.E4M3, power_2_scale=True),
        _with(ROWWISE, **_E4M3, power_2_scale=True),
    ),
    "block": (jaxfp8.Float8BlockScaling(), BLOCK),
    "block hybrid power_2": (
        jaxfp8.Float8BlockScaling(jaxfp8.Format.HYBRID, power_2_scale=True),
        _with(BLOCK, **_HYBRID, power_2_scale=True),
    ),
    "mx": (jaxfp8.MXFP8BlockScaling(), MX),
    "mx hybrid": (jaxfp8.MXFP8BlockScaling(jaxfp8.Format.HYBRID), _with(MX, **_HYBRID)),
    "mx floor": (
        jaxfp8.MXFP8BlockScaling(rounding="floor"),
        _with(MX, rounding="floor"),
    ),
    "mx e5m2 floor": (
        jaxfp8.MXFP8BlockScaling(jaxfp8.Format.E5M2, rounding="floor"),
        _with(MX, **_E5M2, rounding="floor"),
    ),
}

# name of the recipe of each product, None for one in high precision; each kind is once
# in each place
BY_PRODUCT = [
    ("current", "block", None),
    ("block", "mx", "static"),
    ("mx", None, "rowwise"),
    (None, "rowwise", "current e4m3"),
    ("rowwise", "current", "mx"),
    ("static", "static e4m3", "current"),
    ("current", "current e4m3", "current"),
    (None, None, "block"),
    ("mx", "mx", None),
]


def _by_product(*names):
    recipes, rules = zip(
        *(RECIPES[name] if name else (None, PLAIN) for name in names), strict=True
    )
    return jaxfp8.ByProduct(*recipes), ByProduct(*rules)


RECIPES |= {" | ".join(map(str, names)): _by_product(*names) for names in BY_PRODUCT}
# One of each kind, where how numbers are rounded does not matter.
KINDS = ("current", "rowwise", "block", "mx")


@dataclasses.dataclass(frozen=True, eq=False)
class Shapes:
    """A `lax.dot_general` as an einsum of single dimensions, "x,kernel->y", and the
    sizes of these; and how its operands become matrices.
    """

    equation: str
    sizes: dict
    x_dtype: type = F32
    kernel_dtype: type = F32
    out_dtype: type | None = None
    bias: bool = False

    @property
    def names(self) -> list[str]:
        """The dimensions of x, the kernel and y."""
        return re.split(",|->", self.equation)

    def dims(self, kind: str) -> str:
        """The dimensions of the batch "b", the rows of x "m", what is contracted "k"
        and the columns "n", in the order of the operands.
        """
        x, kernel, y = self.names
        kinds = {
            "b": [d for d in x if d in kernel and d in y],
            "m": [d for d in x if d not in kernel],
            "k": [d for d in x if d not in y],
            "n": [d for d in kernel if d not in x],
        }
        return "".join(kinds[kind])

    @property
    def dimension_numbers(self):
        return tuple(
            tuple(tuple(of.index(d) for d in self.dims(kind)) for of in self.names[:2])
            for kind in "kb"
        )

    @property
    def dtype(self):
        """That of y."""
        return self.out_dtype or np.promote_types(self.x_dtype, self.kernel_dtype)

    def arrays(self, seed=0):
        """x, kernel, grad of y, and bias or None; sizes differ by row and column, and
        some numbers are large.
        """
        rng = np.random.default_rng(seed)

        def array(names, dtype, size=1.0):
            shape = [self.sizes[d] for d in names]
            values = rng.standard_normal(shape) * size
            factors = [2.0 ** rng.integers(-2, 3, sides) for sides in shape]
            return (values * functools.reduce(np.multiply.outer, factors)).astype(dtype)

        x, kernel, y = self.names
        bias = array(self.dims("n"), self.kernel_dtype) if self.bias else None
        return (
            array(x, self.x_dtype),
            array(kernel, self.kernel_dtype),
            array(y, self.dtype, 2.0**-6),
            bias,
        )

    def matrices(self, array, names, *kinds):
        """An array with dimensions `names` as `[batch, ...]`, one dimension for each
        kind.
        """
        dims = [self.dims(kind) for kind in ("b", *kinds)]
        ordered = np.einsum(
            f"{names}->{''.join(dims)}", array.astype(np.float64)
        ).astype(array.dtype)
        return ordered.reshape(
            [int(np.prod([self.sizes[d] for d in part])) for part in dims]
        )

    def expected(self, rule, x, kernel, grad, bias=None) -> Step:
        if bias is not None:
            batch = int(np.prod([self.sizes[d] for d in self.dims("b")]))
            bias = np.broadcast_to(bias.reshape(-1), (batch, bias.size))
        of_x, of_kernel, of_y = self.names
        return step(
            rule,
            self.matrices(x, of_x, "m", "k"),
            self.matrices(kernel, of_kernel, "n", "k"),
            self.matrices(grad, of_y, "m", "n"),
            bias=bias,
            x_dtype=self.x_dtype,
            kernel_dtype=self.kernel_dtype,
        )

    def check(self, wanted: Step, y, dx, dkernel, what=""):
        """Raises AssertionError unless arrays are what the matrices of the oracle say,
        within its bounds.
        """
        arrays = {
            "dx": (dx, "mk", self.x_dtype),
            "dkernel": (dkernel, "nk", self.kernel_dtype),
            "y": (y, "mn", self.dtype),
        }
        for (name, array), dims in zip(arrays.items(), self.names, strict=True):
            got, kinds, dtype = array
            shape = tuple(self.sizes[d] for d in dims)
            assert (got.dtype, got.shape) == (dtype, shape), (what, name, got.shape)
            matrices = self.matrices(np.asarray(got), dims, *kinds)
            getattr(wanted, name).check(matrices, f"{what}: {name}")


def dense(m, k, n, **options):
    """x `[m, k]`, kernel `[k, n]`."""
    return Shapes("mk,kn->mn", {"m": m, "k": k, "n": n}, **options)


_TWO = {"m": 5, "j": 6, "k": 7, "n": 4}
SHAPES = {
    "7x5x3": dense(7, 5, 3),
    "ragged": dense(217, 41, 70),
    "blocks": dense(40, 130, 70),
    "f16": dense(9, 70, 5, x_dtype=F16, kernel_dtype=F16, bias=True),
    "bias": dense(130, 33, 7, x_dtype=BF16, out_dtype=BF16, bias=True),
    "matrix by vector": Shapes("mk,k->m", {"m": 6, "k": 40}),
    "both transposed": Shapes("km,nk->mn", {"m": 35, "k": 40, "n": 6}),
    "batch": Shapes("bmk,bkn->bmn", {"b": 3, "m": 6, "k": 40, "n": 9}),
    "batch inside": Shapes(
        "mbkc,nbck->bcmn", {"b": 2, "c": 3, "m": 5, "k": 36, "n": 4}
    ),
    "rows of two": Shapes(
        "abk,kno->abno",
        {"a": 6, "b": 7, "k": 33, "n": 2, "o": 5},
        x_dtype=BF16,
        bias=True,
    ),
    "contracts two": Shapes("mjk,jkn->mn", _TWO),
    "contracts two, crossed": Shapes("mjk,kjn->mn", _TWO),
    "transpose between": Shapes("jmk,nkj->mn", _TWO),
}


def product(shapes: Shapes, recipe):
    """`(x, kernel, bias or None) -> y` of the package."""
    return functools.partial(_product, shapes, recipe)


def _product(shapes, recipe, x, kernel, bias=None):
    return jaxfp8.dot_general(
        x,
        kernel,
        shapes.dimension_numbers,
        recipe=recipe,
        bias=bias,
        preferred_element_type=shapes.out_dtype,
    )


@functools.cache
def compiled(shapes, recipe):
    """`(x, kernel, grad, bias or None) -> (y, dx, dkernel, dbias or None)`: one program
    for all values.
    """

    @jax.jit
    def both(x, kernel, grad, bias):
        y, vjp = jax.vjp(product(shapes, recipe), x, kernel, bias)
        return y, *vjp(grad)

    return both


def run(shapes, recipe, x, kernel, grad, bias=None):
    """`(y, dx, dkernel, dbias or None)`, jitted."""
    return compiled(shapes, recipe)(x, kernel, grad, bias)
