"""Programs: what a loss may do with FP8 layers, as data, and a hypothesis strategy that draws them.

A program maps x `[rows, WIDTH]` to the same shape, so that any two compose. Both interpreters (interpret.py in JAX,
simulate.py in numpy) read these classes and share nothing else.
"""

import dataclasses

from hypothesis import strategies as st

ROWS, WIDTH = 4, 4
MEMBERS = 2  # what Vmap and Map split the rows into, and the length of a stacked leaf
MOST_PRODUCTS = 12


@dataclasses.dataclass(frozen=True)
class Layer:
    """A kernel and a state, each either plain or stacked over MEMBERS."""

    stacked_kernel: bool = False
    stacked_state: bool = False

    @property
    def stacked(self) -> bool:
        return self.stacked_kernel or self.stacked_state


LAYERS = (
    Layer(),
    Layer(),
    Layer(stacked_kernel=True, stacked_state=True),  # an ensemble, or layers in a scan
    Layer(stacked_state=True),  # one kernel, quantized by each member
    Layer(stacked_kernel=True),  # experts that share a state
)


@dataclasses.dataclass(frozen=True)
class Call:
    """`snap(dot_general(x, kernel))` with the kernel and the state of `LAYERS[layer]`."""

    layer: int


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One part after the other; the identity without parts. Twice the same part is a layer called twice."""

    parts: tuple = ()


@dataclasses.dataclass(frozen=True)
class Jit:
    """`jax.jit` of the body. `closed`: the body closes over the layers; otherwise they are arguments."""

    body: object
    closed: bool


@dataclasses.dataclass(frozen=True)
class Remat:
    """`jax.checkpoint` of the body."""

    body: object
    closed: bool


@dataclasses.dataclass(frozen=True)
class Cond:
    """`lax.cond`. `predicate` is True, False or "odd": whether the index of the innermost loop is (outside 0)."""

    predicate: object
    then: object
    otherwise: object
    closed: bool


@dataclasses.dataclass(frozen=True)
class Scan:
    """`lax.scan` with x as the carry; unless `closed` the layers are in the carry as well.

    `members`: stacked leaves are the xs, so that iteration i sees row i of them.
    """

    body: object
    length: int
    members: bool
    closed: bool


@dataclasses.dataclass(frozen=True)
class Map:
    """`lax.map` over MEMBERS groups of rows; with `members` over the stacked leaves too."""

    body: object
    members: bool


@dataclasses.dataclass(frozen=True)
class Vmap:
    """`jax.vmap` over MEMBERS groups of rows; with `members` over the stacked leaves too."""

    body: object
    members: bool
    closed: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A body and how its gradient is taken.

    `entry`: "grad" is plain `jax.grad`, promised to be right only where every body closes over the layers; "max_grad"
    applies `jaxfp8.max_grad` at the top of the loss; "value_and_grad" is `jaxfp8.value_and_grad`.
    """

    body: object
    entry: str
    algorithm: str  # "max", or "power_of_two" with which every scale is one and everything is exact
    dtype: str  # of x
    seed: int


def children(node) -> tuple:
    """The bodies of a node."""
    match node:
        case Call():
            return ()
        case Sequence():
            return node.parts
        case Cond():
            return node.then, node.otherwise
        case _:
            return (node.body,)


def is_closed(node) -> bool:
    """Whether no body below takes layers as arguments; the rows that a Scan or a Map unstacks are arguments too."""
    unstacks = isinstance(node, (Scan, Map)) and node.members
    return getattr(node, "closed", True) and not unstacks and all(is_closed(child) for child in children(node))


def products(node) -> int:
    """How many products one run of the node does at most."""
    times = node.length if isinstance(node, Scan) else MEMBERS if isinstance(node, (Map, Vmap)) else 1
    return isinstance(node, Call) + times * sum(products(child) for child in children(node))


KINDS = ("call twice", "sequence", "jit", "remat", "cond", "scan", "nested scan", "map", "vmap")


@st.composite
def bodies(draw, depth: int, closed, rows: int = ROWS, members: bool = False, kind: str | None = None):
    """A body for x of `rows` rows.

    Args:
        depth: levels of nodes above the calls.
        closed: strategy for the fields of that name.
        members: whether stacked layers are unstacked here.
        kind: of the outermost node, one of KINDS or "call".
    """
    if kind is None:
        kinds = KINDS if rows % MEMBERS == 0 else KINDS[:-2]
        kind = draw(st.sampled_from(kinds if depth > 0 else ("call", "call twice")))

    def body(**changes):
        return draw(bodies(**({"depth": depth - 1, "closed": closed, "rows": rows, "members": members} | changes)))

    if kind.startswith("call"):
        layers = [i for i, layer in enumerate(LAYERS) if members or not layer.stacked]
        call = Call(draw(st.sampled_from(layers)))
        return call if kind == "call" else Sequence((call, call))
    if kind == "sequence":
        return Sequence((body(), body(depth=0)))
    if kind == "cond":
        then, otherwise = draw(st.sampled_from([(body(), Sequence()), (Sequence(), body()), (body(), body(depth=0))]))
        return Cond(draw(st.sampled_from([True, False, "odd"])), then, otherwise, draw(closed))
    if kind in ("jit", "remat"):
        return {"jit": Jit, "remat": Remat}[kind](body(), draw(closed))

    unstacks = not members and draw(st.booleans())
    if kind in ("scan", "nested scan"):
        length = MEMBERS if unstacks else draw(st.integers(1, 3))
        inner = {"kind": "scan", "depth": depth - 1} if kind == "nested scan" else {}
        return Scan(body(members=members or unstacks, **inner), length, unstacks, draw(closed))
    split = body(rows=rows // MEMBERS, members=members or unstacks)
    return Map(split, unstacks) if kind == "map" else Vmap(split, unstacks, draw(closed))


@st.composite
def programs(draw, kind: str | None = None, depth: int = 3):
    """A program of at most MOST_PRODUCTS, its body a node of that kind. In half of them no body takes arguments."""
    closed = draw(st.sampled_from([st.just(True), st.booleans()]))
    fits = bodies(depth, closed, kind=kind).filter(lambda body: products(body) < MOST_PRODUCTS)
    body = Sequence((draw(st.sampled_from([Sequence(), Call(0), Call(1)])), draw(fits)))
    return Program(
        body,
        draw(st.sampled_from(["grad", "grad", "max_grad"] if is_closed(body) else ["max_grad", "value_and_grad"])),
        draw(st.sampled_from(["max", "power_of_two"])),
        draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.integers(0, 2**16)),
    )
