"""The layers of a user's gated MLP, by their names, run as the two products of
GatedMLP.

The forward of the user's module runs, with three layers replaced. Gate and up return
the halves of one product. Down multiplies the activation of that product in place of
its own x, which is then not computed. Before, the forward is traced once more with
arrays in place of gate and up: its x of down has to be the activation of the rule.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from .._jax._samples import NotOfSamples, Samples
from ..ops import ClampedSwiGLU
from ..recipes import DelayedScaling, DotGeneralState, GatedLayers, Recipe, checked
from . import _contexts
from ._compute_dtype import compute_dtype, gated_activation, to_compute
from ._dot_general import dot_general
from ._fused_input import Activated


def gated_layers(
    *,
    gate: str,
    up: str,
    down: str,
    activation: str | ClampedSwiGLU = "silu",
    recipe: Recipe | None = None,
) -> GatedLayers:
    """Name the layers of your own module that a rule runs as a GatedMLP.

        mlp = GatedMLP.of(gate="gate_proj", up="up_proj", down="down_proj")
        model = jaxfp8.quantize(model, [(r".*/mlp", mlp)])

    The module has to compute `down(activation(gate(x)) * up(x))`, with any code before
    and after. Parameters and state keep their names and shapes. Gate and up are one
    product, with one scale for each of x, both kernels and the gradient. The state of
    the gate counts; that of up gets the same next values.

    Args:
        gate, up, down: the names of three layers in the module.
        activation: the activation of the gate, as the field of `GatedMLP`.
        recipe: how operands become FP8; None is `DelayedScaling()`.

    Returns:
        What stands for the recipe in a rule, whose regex matches the path of the
        module.

    Raises:
        TypeError: `recipe` is not a Recipe.
        ValueError: `activation` is unknown, or two layers have one name.
    """
    gated_activation("GatedMLP.of", activation)
    recipe = DelayedScaling() if recipe is None else recipe
    recipe = checked("GatedMLP.of: recipe", recipe)
    if len({gate, up, down}) < 3:
        raise ValueError(
            "GatedMLP.of: gate, up, down: expected the names of three layers, got "
            f"{gate!r}, {up!r}, {down!r}"
        )
    return GatedLayers(gate, up, down, activation, recipe)


class Parameters(NamedTuple):
    """The arrays of a layer.

    Attributes:
        kernel: `[k, n]`.
        bias: `[n]`, or None.
        state: the state of its product.
    """

    kernel: jax.Array
    bias: jax.Array | None
    state: DotGeneralState


class GatedCall:
    """One call of a module whose layers a rule names.

    Attributes:
        path: the path of the module.
        gated: the layers.
        parameters: returns the Parameters of a layer by its name.
        forward: `forward(stand_in)` returns all arrays that the module reads, and its
            forward as a function of them, with `stand_in(name, x, layer)` in place of
            each call of a layer.
        kinds: the classes that a layer may have; all have `dtype` and `precision`.
    """

    def __init__(
        self,
        path: str,
        gated: GatedLayers,
        parameters: Callable[[str], Parameters],
        forward: Callable[..., tuple],
        kinds: tuple[type, ...],
    ):
        self.path, self.gated, self.kinds = path, gated, kinds
        self.parameters, self.forward = parameters, forward
        self.layers = {}
        self.x = self.hidden = None

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """Compute the result of the layer `name` of x `[..., k]`."""
        gate, up, down = self.gated.names
        if name == down and self.hidden is not None:
            hidden, self.hidden = self.hidden, None
            return self._multiply(down, hidden, self.parameters(down))
        if self.hidden is None:
            self.check(x.shape)
            self.x, self.hidden = x, self._hidden(x)
        if x is not self.x:
            raise self._differs(f"{gate} and {up} to have the same x", "two arrays")
        return self.hidden.x[..., (gate, up).index(name), :]

    def _hidden(self, x) -> Activated:
        first, second = map(self.parameters, self.gated.names[:2])
        bias = first.bias
        if bias is not None:
            bias = jnp.stack([bias, second.bias])
        both = Parameters(
            jnp.stack([first.kernel, second.kernel], axis=1),
            bias,
            _first_of(first.state, second.state),
        )
        activation = gated_activation("GatedMLP.of", self.gated.activation)
        return self._multiply(self.gated.gate, x, both, activation)

    def _multiply(self, name, x, parameters, activation=None):
        layer, (kernel, bias, state) = self.layers[name], parameters
        dtype = compute_dtype(x, kernel, bias, dtype=layer.dtype)
        with _contexts.layer(f"{self.path}/{name}"):
            return dot_general(
                x if isinstance(x, Activated) else to_compute(x, dtype),
                kernel,
                (((len(x.shape) - 1,), (0,)), ((), ())),
                recipe=self.gated.recipe,
                state=state,
                bias=bias,
                precision=layer.precision,
                preferred_element_type=dtype,
                activation=activation,
            )

    def check(self, x_shape: tuple[int, ...]) -> None:
        """Compare shapes, biases, dtypes and the activation with the forward of the
        module, for x of this shape.

        Raises:
            ValueError: the module does not compute what the rule says.
        """
        gate, up, down = map(self.parameters, self.gated.names)
        names = ", ".join(self.gated.names)
        shapes = []
        for name, layer in zip(self.gated.names, (gate, up, down), strict=True):
            if layer.kernel is None:
                raise self._differs(f"layers {names}", f"no kernel of {name!r}")
            shapes.append(list(layer.kernel.shape))
        k, n = shapes[0] if len(shapes[0]) == 2 else (0, 0)
        if shapes[1] != [k, n] or len(shapes[2]) != 2 or shapes[2][0] != n:
            raise self._differs(f"kernels [k, n], [k, n] and [n, m] of {names}", shapes)
        if (gate.bias is None) != (up.bias is None):
            raise self._differs(
                f"{self.gated.gate} and {self.gated.up} to have both a bias, or none",
                "one with a bias",
            )
        jaxpr = self._traced(x_shape, n)
        self._check_layers()
        self._check_activation(jaxpr, len(x_shape))

    def _traced(self, x_shape, n):
        """Trace the x of down as a function of gate and up, in float32, and of the
        arrays that the module reads.
        """
        *_, down = self.gated.names
        features = self.parameters(down).kernel.shape[-1]
        values, calls = {}, []

        def stand_in(name, x, layer):
            self.layers[name] = layer
            calls.append(name)
            if name != down:
                return values[name]
            values[name] = x
            return jnp.zeros((*x.shape[:-1], features), x.dtype)

        arrays, forward = self.forward(stand_in)

        def hidden(gate_value, up_value, arrays):
            values.update(zip(self.gated.names, (gate_value, up_value), strict=False))
            # the values would have the dtype that the module casts to
            with jax.numpy_dtype_promotion("standard"):
                forward(arrays)
            if sorted(calls) != sorted(self.gated.names):
                raise self._differs(
                    f"a call of each of {', '.join(self.gated.names)}",
                    f"calls of {', '.join(calls) or 'none of them'}",
                )
            return values.pop(down)

        value = jax.ShapeDtypeStruct((*x_shape[:-1], n), jnp.float32)
        return jax.make_jaxpr(hidden)(value, value, arrays)

    def _check_layers(self) -> None:
        for name, layer in self.layers.items():
            if not isinstance(layer, self.kinds):
                kinds = " or ".join(f"{k.__module__}.{k.__name__}" for k in self.kinds)
                raise self._differs(f"{name} to be a {kinds}", type(layer).__name__)
        gate, up = (self.layers[name] for name in self.gated.names[:2])
        options = [(layer.dtype, layer.precision) for layer in (gate, up)]
        if options[0] != options[1]:
            raise self._differs(
                f"equal dtype and precision of {self.gated.gate} and {self.gated.up}",
                options,
            )

    def _check_activation(self, jaxpr, rank: int) -> None:
        """Compare the x of down with the activation, at samples of gate and up."""
        expected = (
            f"the x of {self.gated.down} to be {self.gated.activation!r} of "
            f"{self.gated.gate} times {self.gated.up}"
        )
        shape = (1,) * (rank - 1) + (-1,)
        gate = np.linspace(-20, 20, 161, dtype=np.float32).reshape(shape)
        up = np.roll(gate, 57)[..., ::-1]
        # the samples lie on one device, also inside of a shard_map
        no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
        with no_mesh, jax.ensure_compile_time_eval():
            activation = gated_activation("GatedMLP.of", self.gated.activation)
            right = np.asarray(ops.activate(np.stack([gate, up], -2), activation))
            samples = Samples()
            try:
                (values,) = samples.compute(jaxpr, [jnp.asarray(gate), jnp.asarray(up)])
                values = np.broadcast_to(np.asarray(values, np.float32), gate.shape)
            except NotOfSamples as error:
                raise self._differs(expected, error) from error
            except (TypeError, ValueError) as error:
                got = f"a function that is not of each element ({error})"
                raise self._differs(expected, got) from error
        # Both sum and multiply a few numbers of at most 1 + |gate| and 1 + |up|, each
        # rounded to float32; constants of the module are rounded to its dtype.
        tolerance = 80 * 2.0**-23 if samples.eps == 2.0**-23 else 2 * samples.eps
        errors = np.abs(values - right) / ((1 + np.abs(gate)) * (1 + np.abs(up)))
        if not errors.max() <= tolerance:
            at = errors.argmax()
            got, needed, g, u = (v.flat[at] for v in (values, right, gate, up))
            raise self._differs(
                expected, f"{got:.6g} for gate {g:.6g} and up {u:.6g}, not {needed:.6g}"
            )

    def _differs(self, expected: str, got) -> ValueError:
        return ValueError(
            f"quantize: rules: {self.path or 'the model'}: GatedMLP.of: expected "
            f"{expected}, got {got}; correct the rule, or give the layers a recipe "
            "each"
        )


@jax.custom_vjp
def _first_of(first, second):
    """Return the first of two states, and give both the same next state."""
    return first


def _first_of_forward(first, second):
    return first, None


def _first_of_backward(residuals, next_state):
    return next_state, next_state


_first_of.defvjp(_first_of_forward, _first_of_backward)
