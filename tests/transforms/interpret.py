"""Programs in JAX: the loss that a user would write, its gradient, and the comparison with the simulation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxfp8
from transforms import programs as p, simulate

HISTORY = 4
MATMUL = (((1,), (0,)), ((), ()))
OWG = "_overwrite_with_gradient"
QUANTIZERS = ("input", "kernel", "output_grad")


def power_of_two(history):
    """As simulate.power_of_two."""
    units = jnp.asarray(7 * 2.0 ** np.arange(-8, 9), jnp.float32)
    largest = jnp.max(history)
    least = jnp.min(jnp.where(units >= largest, units, jnp.inf))
    return jnp.where(largest > 0, least, 0.0)


ALGORITHMS = {"max": "max", "power_of_two": power_of_two}


def recipe(algorithm):
    return jaxfp8.DelayedScaling(amax_history_len=HISTORY, amax_compute_algo=ALGORITHMS[algorithm])


@jax.custom_vjp
def snap(y):
    """As simulate.snap, which says why."""
    return jnp.clip(jnp.round(y / 8), -simulate.SNAP_RANGE, simulate.SNAP_RANGE)


snap.defvjp(lambda y: (snap(y), None), lambda _, grad: (snap(grad),))


class Interpreter:
    """Runs a body with the layers as a list of `(kernel, state)`; `predicates` is bool `[2]`: False, True."""

    def __init__(self, algorithm, predicates):
        self.recipe, self.predicates = recipe(algorithm), predicates

    def run(self, node, layers, x, index):
        match node:
            case p.Call():
                kernel, state = layers[node.layer]
                return snap(
                    jaxfp8.dot_general(
                        x, kernel, MATMUL, recipe=self.recipe, state=state, preferred_element_type=x.dtype
                    )
                )
            case p.Sequence():
                for part in node.parts:
                    x = self.run(part, layers, x, index)
                return x
            case p.Jit():
                return self._wrap(jax.jit, node, layers, x, index)
            case p.Remat():
                return self._wrap(jax.checkpoint, node, layers, x, index)
            case p.Cond():
                return self._cond(node, layers, x, index)
            case p.Scan():
                return self._scan(node, layers, x)
            case p.Map() | p.Vmap():
                return self._split(node, layers, x, index)
        raise TypeError(f"not a node: {node!r}")

    def _wrap(self, transformation, node, layers, x, index):
        if node.closed:
            return transformation(lambda x: self.run(node.body, layers, x, index))(x)
        return transformation(functools.partial(self.run, node.body))(layers, x, index)

    def _cond(self, node, layers, x, index):
        predicate = index % 2 == 1 if node.predicate == "odd" else self.predicates[int(node.predicate)]
        if node.closed:
            then, otherwise = (
                lambda x, body=body: self.run(body, layers, x, index) for body in (node.then, node.otherwise)
            )
            return jax.lax.cond(predicate, then, otherwise, x)
        then, otherwise = (functools.partial(self.run, body) for body in (node.then, node.otherwise))
        return jax.lax.cond(predicate, then, otherwise, layers, x, index)

    def _scan(self, node, layers, x):
        stacked = _stacked(layers) if node.members else {}
        indices = jnp.arange(node.length)

        def over_carry(carry, xs):
            layers, x = carry
            index, rows = xs
            return (layers, self.run(node.body, _merged(layers, rows), x, index)), None

        def over_x(x, xs):
            return over_carry((layers, x), xs)[0][1], None

        if node.closed:
            return jax.lax.scan(over_x, x, (indices, stacked))[0]
        return jax.lax.scan(over_carry, (layers, x), (indices, stacked))[0][1]

    def _split(self, node, layers, x, index):
        stacked = _stacked(layers) if node.members else {}
        groups = x.reshape(p.MEMBERS, -1, p.WIDTH)
        if isinstance(node, p.Map):

            def one_group(group, rows, index):
                return self.run(node.body, _merged(layers, rows), group, index)

            y = jax.lax.map(lambda xs: one_group(*xs), (groups, stacked, jnp.arange(p.MEMBERS)))
        elif node.closed:
            y = jax.vmap(lambda group, rows: self.run(node.body, _merged(layers, rows), group, index))(groups, stacked)
        else:
            arguments = _merged(layers, stacked)
            axes = _merged([(None, None) for _ in layers], jax.tree.map(lambda _: 0, stacked))
            y = jax.vmap(functools.partial(self.run, node.body), in_axes=(axes, 0, None))(arguments, groups, index)
        return y.reshape(x.shape)


def _stacked(layers):
    """The stacked leaves, as {(layer, 0 for its kernel or 1 for its state): leaf}."""
    kinds = {(i, 0): layer.stacked_kernel for i, layer in enumerate(p.LAYERS)}
    kinds |= {(i, 1): layer.stacked_state for i, layer in enumerate(p.LAYERS)}
    return {where: layers[where[0]][where[1]] for where, stacked in sorted(kinds.items()) if stacked}


def _merged(layers, rows):
    """The layers with some of their leaves replaced."""
    return [tuple(rows.get((i, part), leaf) for part, leaf in enumerate(layer)) for i, layer in enumerate(layers)]


def gradient_function(program, jit):
    """(kernels, states, x, grad, predicates) -> (loss, gradients of kernels, next states, gradient of x)."""

    def loss(variables, x, grad, predicates):
        if program.entry == "max_grad":
            variables = jaxfp8.max_grad(variables)
        layers = list(zip(variables["params"], variables[OWG], strict=True))
        y = Interpreter(program.algorithm, predicates).run(program.body, layers, x, jnp.int32(0))
        return jnp.sum(y.astype(jnp.float32) * grad)

    differentiate = jaxfp8.value_and_grad if program.entry == "value_and_grad" else jax.value_and_grad

    def step(kernels, states, x, grad, predicates):
        variables = {"params": kernels, OWG: states}
        value, (gradients, dx) = differentiate(loss, argnums=(0, 1))(variables, x, grad, predicates)
        return value, gradients["params"], gradients[OWG], dx

    return jax.jit(step) if jit else step


# ------------------------------------------------------------------------------------------------------- comparison


def check(program, jit=True, steps=3) -> None:
    """Runs the program for some steps in both interpreters; an AssertionError names the first difference."""
    rng = np.random.default_rng(program.seed)
    states = initial_states(rng)
    step = gradient_function(program, jit)
    for i in range(steps):
        kernels, x, grad = values(rng, program.dtype)
        got = step(
            [jnp.asarray(kernel) for kernel in kernels],
            [pack(rows, layer.stacked_state) for rows, layer in zip(states, p.LAYERS, strict=True)],
            jnp.asarray(x),
            jnp.asarray(grad),
            jnp.asarray([False, True]),
        )
        simulation = simulate.Simulation(kernels, states, program.algorithm)
        y, dx = simulation.gradient(program.body, x, grad.astype(x.dtype))
        loss = np.sum(y.astype(np.float32) * grad, dtype=np.float32)  # integers below 2**24
        next_states = simulation.next_states()
        assert_result(got, (loss, simulation.kernel_gradients, next_states, dx), f"step {i}", program.algorithm)
        states = [
            [old if new is None else new for old, new in zip(*rows, strict=True)]
            for rows in zip(states, next_states, strict=True)
        ]


def assert_result(got, expected, what, algorithm) -> None:
    """Bitwise, but for kernel gradients where the simulation has a bound for them; -0 counts as 0."""
    value, kernels, states, dx = got
    expected_value, expected_kernels, expected_states, expected_dx = expected
    oracle.assert_bitwise(value + 0, expected_value + 0, f"{what}: loss")
    for i, layer in enumerate(p.LAYERS):
        assert_state(states[i], expected_states[i], layer.stacked_state, f"{what}: layer {i}")
        rows = [kernels[i][row] for row in range(p.MEMBERS)] if layer.stacked_kernel else [kernels[i]]
        for row, total in zip(rows, expected_kernels[i], strict=False):
            bound = total.bound()
            assert algorithm != "power_of_two" or not np.any(bound), "the program leaves the range of exact sums"
            error = np.abs(np.asarray(row, np.float64) - total.value)
            assert np.all(error <= bound), f"{what}: kernel gradient of layer {i}: {row}, expected {total.value}"
    oracle.assert_bitwise(_positive_zero(dx), _positive_zero(expected_dx), f"{what}: gradient of x")


def _positive_zero(values):
    """-0 as 0: the sign of a zero sum depends on the order of its terms."""
    values = np.asarray(values)
    return np.where(values == 0, np.zeros_like(values), values)


def assert_state(got, expected, stacked, what) -> None:
    """`got` a DotGeneralState; `expected` a list of one LayerState a row, None where it was not used."""
    for name in QUANTIZERS:
        part = getattr(got, name)
        for leaf, size in (("amax_history", HISTORY), ("scale", 1)):
            rows = [
                np.zeros(size, np.float32)
                if row is None
                else np.float32(getattr(getattr(row, name), leaf)).reshape(size)
                for row in expected
            ]
            wanted = np.stack(rows) if stacked else rows[0]
            oracle.assert_bitwise(getattr(part, leaf), wanted, f"{what}: {name}.{leaf}")


def pack(rows, stacked):
    """A list of LayerStates as the package's pytree, stacked or the only one of it."""
    parts = []
    for name in QUANTIZERS:
        history = np.stack([getattr(row, name).amax_history for row in rows])
        scale = np.float32([[getattr(row, name).scale] for row in rows])
        leaves = (history, scale) if stacked else (history[0], scale[0])
        parts.append(jaxfp8.recipes.QuantizerState(*(jnp.asarray(leaf) for leaf in leaves)))
    return jaxfp8.recipes.DotGeneralState(*parts)


def initial_states(rng):
    """New states, or ones with a full history that differs in every slot and a stored scale of its own."""
    new = rng.random() < 0.3

    def quantizer():
        if new:
            return oracle.State.init(HISTORY)
        history = rng.permutation(np.arange(1, 8))[:HISTORY] * 2.0 ** rng.integers(-1, 2)
        return oracle.State(history.astype(np.float32), np.float32(2.0**-5))

    return [
        [
            oracle.LayerState(quantizer(), quantizer(), quantizer())
            for _ in range(p.MEMBERS if layer.stacked_state else 1)
        ]
        for layer in p.LAYERS
    ]


def values(rng, dtype):
    """(kernels, x, grad of the loss) of a step: small integers, kernels times a power of two (simulate.py)."""

    def integers(shape, largest):
        return rng.integers(-largest, largest + 1, shape).astype(np.float32)

    kernels = [
        integers(((p.MEMBERS,) if layer.stacked_kernel else ()) + (p.WIDTH, p.WIDTH), 7)
        * np.float32(2.0 ** rng.integers(-2, 1))
        for layer in p.LAYERS
    ]
    x = integers((p.ROWS, p.WIDTH), rng.integers(1, 8)).astype(jnp.dtype(dtype))
    return kernels, x, integers((p.ROWS, p.WIDTH), 60)
