"""The report of a Linen model, whose layers are recorded while `init` or `apply` is traced for shapes."""

import jax
from flax import linen as nn

from .._jax._arrays import split_arrays
from ..linen._quantize import decision, is_layer
from ..linen._scopes import regions
from ..linen._state import Fp8Module
from ..recipes import OVERWRITE_WITH_GRADIENT, QTensor, first_match, init_state, relative
from ._report_rows import first_matrix, recipe_and_reason, row, rule_text, skipped, why_no_product

NO_PRODUCT = {
    nn.MultiHeadDotProductAttention: "attention scores have no FP8 product; its query, key, value and out are layers",
    (nn.Conv, nn.ConvTranspose, nn.ConvLocal): "convolutions have no FP8 product",
    nn.Embed: "an embedding is looked up, and attend has no FP8 product",
}

# This context is part of jit's cache key, so that blocks in nn.jit are traced anew for each report; the methods of a
# cached block would not run.
_report = jax.make_user_context(None)


def rows(model, variables, args, kwargs):
    """Return `(rows, unused rules)` of a Linen model."""
    recorder = _Recorder()
    with _report(object()), nn.intercept_methods(recorder.record):
        _trace(model, variables, args, kwargs)
    return list(recorder.rows.values()), recorder.unused()


def _trace(model, variables, args, kwargs) -> None:
    arrays, joined = split_arrays((variables, args, kwargs))

    def run(arrays):
        variables, args, kwargs = joined(arrays)
        if variables is None:
            return model.init(jax.random.key(0), *args, **kwargs)
        return model.apply(variables, *args, **kwargs)

    jax.eval_shape(run, arrays)


class _Recorder:
    """Collects a row for each layer that a model's methods run, and the rules that decided."""

    def __init__(self):
        self.rows, self.owners, self.regions, self.used = {}, {}, [], set()

    def unused(self) -> list[str]:
        """Return the texts of the rules that decided about no layer."""
        rules = [(region, i, rule) for region in self.regions for i, rule in enumerate(region.rules)]
        return [rule_text(i, rule) for region, i, rule in rules if (region, i) not in self.used]

    def record(self, next_method, args, kwargs, context):
        """Run a method in Flax's place, and record the layer or product that it belongs to."""
        module = context.module
        self.regions += [region for region in regions(module.scope) if region not in self.regions]
        result = next_method(*args, **kwargs)
        if isinstance(module, Fp8Module):
            if context.method_name == "__call__":
                self._product(module, args)
        elif context.method_name in ("__call__", "attend"):
            self._module(module, args)
        return result

    def _product(self, product, args) -> None:
        """Record an FP8 product in the name of the layer that holds it, unless the code gave the product a name."""
        kind, owner = type(product).__name__, "/".join(product.path[:-1])
        # 1. Find the path to report. A scan calls its body more than once, so a product may be recorded again.
        first = self.owners.setdefault(owner, product.path)
        is_named = not product.path or product.path[-1] != f"{kind}_0"
        path = "/".join(product.path) if is_named or first != product.path else owner
        arrays = [arg.data if isinstance(arg, QTensor) else arg for arg in args if hasattr(arg, "shape")]
        # 2. Find the recipe, and the rule or the code that names it.
        decided = decision(product)
        if decided is None:
            named, why = product.named_recipe(), None
        else:
            named, why = decided.rule.layer_recipe, self._use(decided.region, decided.index)
        recipe, why = recipe_and_reason(named, product._recipe_of_fields, why)
        keeps_state = recipe is not None and jax.tree.leaves(jax.eval_shape(lambda: init_state(recipe)))
        if keeps_state and OVERWRITE_WITH_GRADIENT not in product.variables:
            why += "; the variables have no state of it: scales of the tensors at hand"
        self.rows[path] = row(path, kind, recipe, why, *(tuple(array.shape) for array in arrays[:2]))

    def _module(self, module, args) -> None:
        """Record any other module: a layer, or a module whose parameters have no FP8 product."""
        path, kind = "/".join(module.path), type(module).__name__
        if path in self.owners:
            if path in self.rows:
                self.rows[path]["kind"] = kind
            return
        # 1. Report a layer that takes rules, but whose product is not of jaxfp8.
        kernel = first_matrix(nn.meta.unbox(module.variables.get("params", {})))
        shapes = (tuple(args[0].shape) if args and hasattr(args[0], "shape") else None, kernel)
        if is_layer(module):
            decided = decision(module)
            if decided is None:
                replaced = getattr(module, "dot_general_cls", None) or getattr(module, "dot_general", None)
                why = "no rule" if replaced is None else f"own {getattr(replaced, '__name__', replaced)}"
            else:
                why = self._use(decided.region, decided.index)
            self.rows[path] = row(path, kind, None, why, *shapes)
            return
        # 2. Report a module without a product only where a rule matches the module in vain.
        reason = why_no_product(NO_PRODUCT, module)
        if reason is None and kernel is None:
            return
        for region in regions(module.scope):
            below = relative(module.path, region.root)
            index = None if below is None else first_match(region.rules, [below], None)
            if index is not None:
                why = skipped(self._use(region, index), region.rules[index], reason or "takes no dot_general_cls")
                self.rows[path] = row(path, kind, None, why, *shapes)
                return

    def _use(self, region, index: int) -> str:
        self.used.add((region, index))
        return rule_text(index, region.rules[index])
