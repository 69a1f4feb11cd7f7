"""TrainState for whole variables dicts, and a scan over layers that reads their state
before the loop.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import optax
from flax import core, linen as nn, nnx
from flax.training import train_state

from ..recipes import OVERWRITE_WITH_GRADIENT, without_max
from ..train import _steps, apply_with_max_grad, max_grad


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for variables with FP8 state.

        variables = model.init(key, x)
        train = jaxfp8.linen.TrainState.create(
            apply_fn=model.apply, params=variables, tx=tx
        )
        grads = jax.grad(lambda variables: loss(train.apply_fn(variables, x)))(
            train.params
        )
        train = train.apply_gradients(grads=grads)

    `params` is the parameters alone, as in Flax, or a variables dict, which has a
    collection `params` and may have `_overwrite_with_gradient` and others. Of a
    variables dict `tx` sees the collection `params` only, so that `opt_state` is that
    of Flax, and stays valid when the model's recipe changes. Quantizer state becomes
    `jaxfp8.update_state(old, gradient)`; every other collection stays as it is. With
    `optax.MultiSteps` in `tx` the state of the mini-steps combines by max, is kept in
    `opt_state` and stored in the step that MultiSteps takes. A step that
    `optax.apply_if_finite` rejects leaves the state as it was. A `tx` that can write
    the next parameters itself, such as `jaxfp8.optim.adamw`, does so. Variables of
    `jaxfp8.train.stack_state` keep the state of many layers in few arrays.
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Take one step.

        Args:
            grads: the gradient with respect to `params`, to some of its collections, or
                to the parameters alone. Gradients of collections other than `params`
                and `_overwrite_with_gradient` are ignored.
            **kwargs: new values of fields, or of collections, such as
                `batch_stats=updated["batch_stats"]`.

        Returns:
            The next TrainState.

        Raises:
            ValueError: the state in `grads` was summed, averaged, clipped or unscaled
                (outside of `jit`).
        """
        params, params_gradient, before = self.params, grads, self.opt_state
        old, new = {}, {}
        has_variables = _is_variables(params)
        if has_variables:
            params, params_gradient = params["params"], grads.get("params", grads)
            before = _steps.begin(before, self.params)
            owg = OVERWRITE_WITH_GRADIENT
            if owg in self.params and owg in grads:
                old, new = {owg: self.params[owg]}, {owg: grads[owg]}
        _, params, state, opt_state = _steps.step(
            self.tx, params_gradient, before, params, old, new
        )
        if has_variables:
            changed = {"params": params, **state}
            for name in kwargs.keys() & self.params.keys():
                if not hasattr(self, name):  # a collection, and no field
                    changed[name] = kwargs.pop(name)
            params = core.copy(self.params, changed)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Make a TrainState at step 0 with the optimizer state that `tx` makes of the
        parameters.

        The `apply_fn` of the result reads the state of stacked layers before the loops
        over them, also for `jax.grad`.

        Raises:
            TypeError: `params` is an NNX module.
        """
        if isinstance(params, nnx.Module):
            raise TypeError(
                "linen.TrainState: create: params: expected the variables of a Linen "
                f"model, got the NNX module {type(params).__name__}; train it with "
                "jaxfp8.nnx.Optimizer(model, tx)"
            )
        parameters = params
        if _is_variables(params):
            parameters = params["params"]
            if apply_fn is not None:
                apply_fn = _ApplyWithMaxGrad(apply_fn)
        train = super().create(apply_fn=apply_fn, params=parameters, tx=tx, **kwargs)
        return train.replace(
            params=params, opt_state=_steps.begin(train.opt_state, params)
        )


@dataclasses.dataclass(frozen=True)
class _ApplyWithMaxGrad:
    """An `apply_fn` that calls `apply_with_max_grad`. jit's cache compares it: equal
    functions give equal objects.
    """

    apply_fn: Callable[..., Any]

    def __call__(self, variables: Any, *args: Any, **options: Any) -> Any:
        return apply_with_max_grad(self.apply_fn, variables, *args, **options)


def _is_variables(params) -> bool:
    """Tell whether `params` is a variables dict: it has a collection `params`."""
    return isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)


def scan(
    target: Callable[..., Any], *args: Any, methods: Any = None, **options: Any
) -> Callable[..., Any]:
    """Scan over layers as `nn.scan` does, with the same arguments, parameters and
    state.

        layers = jaxfp8.linen.scan(
            Block,
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=32,
        )

    With `jax.grad`, `nn.scan` slices and writes the history of a layer in each
    iteration. This loop runs over a few numbers of each layer, and all histories move
    once, after the loop. `jaxfp8.grad` does the same with `nn.scan`.
    """
    scanned = nn.scan(target, *args, methods=methods, **options)
    mapped = nn.map_variables(
        scanned,
        OVERWRITE_WITH_GRADIENT,
        trans_in_fn=max_grad,
        trans_out_fn=without_max,
        # the collection is mutable where the surrounding scope has it mutable
        mutable=True,
        methods=methods,
    )
    mapped.__name__ = scanned.__name__  # Flax names a layer after this
    return mapped
