"""Layers of a user's module, by their names, run as one product of one x, or as the two
products of GatedMLP.

The forward of the user's module runs with these layers replaced. The first call of a
layer computes the product of the kernels of all, and each layer returns its part. In a
GatedMLP down multiplies the activation of that product in place of its own x, which is
then not computed. Before, the forward is traced once more with arrays in place of gate
and up: its x of down has to be the activation of the rule.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from .._jax._samples import Samples
from ..ops import ClampedSwiGLU
from ..recipes import DelayedScaling, DotGeneralState, NamedLayers, Recipe, checked
from . import _contexts
from ._compute_dtype import compute_dtype, gated_activation, linear
from ._dot_general import dot_general
from ._fused_input import Pair

# The least columns of a layer that lie side by side in a kernel of several layers.
_COLUMNS = 64


def gated_layers(
    *,
    gate: str,
    up: str,
    down: str,
    activation: str | ClampedSwiGLU = "silu",
    recipe: Recipe | None = None,
) -> NamedLayers:
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
    return _named("GatedMLP.of: gate, up, down", (gate, up, down), recipe, activation)


def dense_layers(*names: str, recipe: Recipe | None = None) -> NamedLayers:
    """Name the layers of your own module that multiply one x, and that a rule runs as
    one product.

        qkv = Dense.of("query", "key", "value")
        model = jaxfp8.quantize(model, [(r".*/attention", qkv)])

    The product is `split(x @ concatenate(kernels, -1) + concatenate(biases, -1))`, with
    one scale for each of x, all kernels and the gradient. Kernels are rounded as their
    layers round them: those of Flax to the compute dtype, those of jaxfp8 only to FP8.
    Parameters and state keep their names and shapes. The state of the first name
    counts; those of the others get the same next values. A call of the module has to
    call each layer with the same array. For cross-attention name key and value alone.

    Args:
        *names: the names of two layers or more in the module, which multiply the last
            dimension of x: kernels `[k, *features]` of any features; biases in all of
            them, or in none.
        recipe: how operands become FP8; None is `DelayedScaling()`.

    Returns:
        What stands for the recipe in a rule, whose regex matches the path of the
        module.

    Raises:
        TypeError: `recipe` is not a Recipe.
        ValueError: there are less than two names, or two layers have one name.
    """
    return _named("Dense.of: names", names, recipe)


def _named(where: str, names: tuple[str, ...], recipe, activation=None) -> NamedLayers:
    recipe = DelayedScaling() if recipe is None else recipe
    recipe = checked(f"{where.partition(':')[0]}: recipe", recipe)
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(
            f"{where}: expected names of different layers, two or more, got {names}"
        )
    return NamedLayers(names, recipe, activation)


class Parameters(NamedTuple):
    """The arrays of a layer.

    Attributes:
        kernel: `[k, *features]`.
        bias: `[*features]`, or None.
        state: the state of its product.
    """

    kernel: jax.Array
    bias: jax.Array | None
    state: DotGeneralState


@dataclasses.dataclass
class LayersCall:
    """One call of a module of which a rule runs layers as one product, or as a
    GatedMLP.

    Attributes:
        path: the path of the module.
        named: the layers.
        parameters: the Parameters of each layer that has a kernel, by its name.
        kinds: the classes that a layer may have, that of jaxfp8 last; all have `dtype`
            and `precision`.
        forward: `forward()` runs the forward of the module once more, apart, with
            this object in place of its layers.
        x, first: the x of the joined layers and the one that was called first, as of
            the last call.
        results: for layers that were not called yet, by name, the part of the product;
            for down its x, which is the activation of gate and up.
        joined: the names of the layers of the product; in a GatedMLP gate and up.
        down: the name of down in a GatedMLP, else None.
        stand_in: while the module is compared with its rule, `stand_in(name, x)` in
            place of each call of a layer; else None.
    """

    path: str
    named: NamedLayers
    parameters: dict[str, Parameters]
    kinds: tuple[type, ...]
    forward: Callable[[], Any]
    x: Any = None
    first: Any = None
    results: dict[str, Any] = dataclasses.field(default_factory=dict)

    stand_in = None

    def __post_init__(self):
        self.joined, self.down = self.named.names, None
        if self.named.activation is not None:
            *self.joined, self.down = self.named.names

    def __call__(self, name: str, layer: Any, args: tuple, kwargs: dict) -> jax.Array:
        """Compute the result of a layer.

        Args:
            name, layer: the layer.
            args, kwargs: of its call.

        Raises:
            ValueError: the module does not compute what the rule says.
        """
        if self.stand_in is not None:
            return self.stand_in(name, args[0])
        x = self.checked_x(name, layer, args, kwargs)
        if name == self.down and name in self.results:
            hidden = self.results.pop(name)
            return self.multiply(name, layer, hidden, *self.parameters[name])
        if not self.results:
            self.x, self.first = x, layer
            kernels, biases, states = zip(*self.parts(), strict=True)
            state = _first_of(*states)
            if self.down is None:
                self.multiply_joined(kernels, biases, state)
            else:
                self.multiply_pair(kernels, biases, state)
        is_same = x is self.x and name in self.results
        if not is_same or self._options(layer) != self._options(self.first):
            raise self.differs(
                f"one call of each of {', '.join(self.joined)}, all with the same x, "
                "equal dtype and precision, and all layers of Flax or none",
                f"another call of {name}",
            )
        return self.results.pop(name)

    def checked_x(self, name, layer, args, kwargs) -> jax.Array:
        """Return the x `[..., k]` of the call of a layer that multiplies x alone, by
        its last dimension.
        """
        x, *options = *args, *kwargs.values()
        axis = np.ravel(getattr(layer, "axis", -1)).tolist()
        batch = getattr(layer, "batch_dims", getattr(layer, "batch_axis", ()))
        is_plain = isinstance(layer, self.kinds) and not batch
        is_plain = is_plain and all(option is None for option in options)
        if not is_plain or axis not in ([-1], [len(x.shape) - 1]):
            kinds = " or ".join(f"{k.__module__}.{k.__name__}" for k in self.kinds)
            raise self.differs(
                f"{name} to be a {kinds} that multiplies the last dimension of x, and "
                "a call with x alone",
                f"{type(layer).__name__} with the axes {axis} of {len(x.shape)}, and "
                f"{len(options)} more arguments",
            )
        return x

    def _options(self, layer) -> tuple:
        """Return what is equal in the layers of the product."""
        return layer.dtype, layer.precision, isinstance(layer, self.kinds[-1])

    def parts(self) -> list[Parameters]:
        """Return what the layers of the product have."""
        names = self.named.names
        for name in names:
            if name not in self.parameters:
                raise self.differs(
                    f"layers {', '.join(names)}", f"no kernel of {name!r}"
                )
        parts = [self.parameters[name] for name in self.joined]
        if len({part.bias is None for part in parts}) > 1:
            raise self.differs(
                f"{', '.join(self.joined)} to have all a bias, or none", "some with one"
            )
        return parts

    def multiply_joined(self, kernels, biases, state) -> None:
        """Compute the results of layers as one product, of joined kernels."""
        if not isinstance(self.first, self.kinds[-1]):
            # Flax's layers round their kernels to the compute dtype
            dtype = compute_dtype(self.x, *kernels, *biases, dtype=self.first.dtype)
            kernels = [kernel.astype(dtype) for kernel in kernels]
        features = [kernel.shape[1:] for kernel in kernels]
        groups = _groups(features)
        kernel = _joined(kernels, 1, groups)
        bias = None if biases[0] is None else _joined(biases, 0, groups)
        y = self.multiply(self.joined[0], self.first, self.x, kernel, bias, state)
        ends = np.cumsum(list(map(math.prod, features))) // groups
        values = jnp.split(y, ends[:-1], -1)
        for name, value, shape in zip(self.joined, values, features, strict=True):
            rows, first = value.shape[:-2], shape[0] // groups
            value = value.reshape(*rows, groups, first, *shape[1:])
            self.results[name] = value.reshape(*rows, *shape)

    def multiply_pair(self, kernels, biases, state) -> None:
        """Compare the module with its rule, and compute gate, up and the x of down."""
        activation = gated_activation("GatedMLP.of", self.named.activation)
        self._check_activation(activation, self._traced(kernels[0].shape[1:]))
        bias = None if biases[0] is None else jnp.stack(biases)
        hidden = self.multiply(
            self.joined[0], self.first, self.x, Pair(*kernels), bias, state, activation
        )
        parts = *jnp.unstack(hidden.x, axis=-2), hidden
        self.results.update(zip(self.named.names, parts, strict=True))

    def multiply(self, name, layer, x, kernel, bias, state, activation=None):
        """Multiply x by parameters with the options of `layer`, in its name."""
        product = functools.partial(dot_general, recipe=self.named.recipe, state=state)
        with _contexts.layer(f"{self.path}/{name}"):
            return linear(layer, product, x, kernel, bias, None, activation)

    def differs(self, expected: str, got) -> ValueError:
        """Make the error of a module that does not compute what the rule says."""
        return ValueError(
            f"quantize: rules: {self.path or 'the model'}: as {self.named.kind}: "
            f"expected {expected}, got {got}; correct the rule, or give the layers a "
            "recipe each"
        )

    def _traced(self, features):
        """Trace the x of down as a function of gate and up `[..., *features]`, in
        float32.
        """
        down = self.parameters[self.down].kernel

        def hidden(*gate_and_up):
            values = dict(zip(self.joined, gate_and_up, strict=True))

            def stand_in(name, x):
                if name != self.down:
                    return values[name]
                values[name] = x
                return jnp.zeros((*x.shape[:-1], *down.shape[1:]), x.dtype)

            self.stand_in = stand_in
            # the values would have the dtype that the module casts to
            with jax.numpy_dtype_promotion("standard"):
                self.forward()
            self.stand_in = None
            if self.down not in values:
                raise self.differs(f"a call of {self.down}", "none")
            return values[self.down]

        shape = *self.x.shape[:-1], *features
        value = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.make_jaxpr(hidden)(value, value)

    def _check_activation(self, activation, jaxpr) -> None:
        """Compare the x of down with the activation, at samples of gate and up."""
        expected = (
            f"the x of {self.down} to be {self.named.activation!r} of "
            f"{' times '.join(self.joined)}"
        )
        gate = np.linspace(-20, 20, 161, dtype=np.float32)
        gate = gate[(None,) * (len(self.x.shape) - 1)]
        up = np.roll(gate, 57)[..., ::-1]
        # the samples lie on one device, also inside of a shard_map
        no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
        with no_mesh, jax.ensure_compile_time_eval():
            right = np.asarray(ops.activate(np.stack([gate, up], -2), activation))
            samples = Samples()
            try:
                (values,) = samples.compute(jaxpr, [gate, up])
                values = np.broadcast_to(np.asarray(values, np.float32), gate.shape)
            except (TypeError, ValueError) as error:
                got = f"a function that is not of each element ({error})"
                raise self.differs(expected, got) from error
        # Both sum and multiply a few numbers of at most 1 + |gate| and 1 + |up|, each
        # rounded to float32; constants of the module are rounded to its dtype.
        tolerance = max(80 * 2.0**-23, 2 * samples.eps)
        errors = np.abs(values - right) / ((1 + np.abs(gate)) * (1 + np.abs(up)))
        if not errors.max() <= tolerance:
            at = errors.argmax()
            got, needed, g, u = (v.flat[at] for v in (values, right, gate, up))
            raise self.differs(
                expected, f"{got:.6g} for gate {g:.6g} and up {u:.6g}, not {needed:.6g}"
            )


def _groups(features) -> int:
    """Return the groups of columns of joined kernels: each has the same part of all
    layers, whole heads of at least `_COLUMNS` columns.

    A mesh axis that divides the groups cuts the joined kernel as it cuts the kernels.
    """
    heads = math.gcd(*(each[0] for each in features))
    groups = max(min(map(math.prod, features)) // _COLUMNS, 1)
    while heads % groups:
        groups -= 1
    return groups


def _joined(arrays, leading: int, groups: int) -> jax.Array:
    """Return arrays `[*leading, *features]` as one, `[*leading, groups, columns]`.

    The first of the features may be sharded, so that the others are joined apart.
    """
    parts = []
    for array in arrays:
        shape = list(array.shape)
        shape[leading : leading + 1] = groups, shape[leading] // groups
        parts.append(jax.lax.collapse(array.reshape(shape), leading + 1))
    return jnp.concatenate(parts, -1)


@jax.custom_gradient
def _first_of(*states):
    """Return the first of some states, and give all the same next state."""
    return states[0], lambda next_state: (next_state,) * len(states)
