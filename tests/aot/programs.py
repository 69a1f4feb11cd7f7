"""Training programs compiled for H200s, in bf16, with Flax's FP8 and with ours; prints
as JSON what `count` finds.

    python -m aot.programs [--quickly] [--gpu b200] GROUP...

A candidate is how a layer is made: `bf16` (`nn.Dense`), `flax` (`nn.Dense` with
`nn.Fp8DirectDotGeneralOp`), `drop-in` (`nn.Dense` with `jaxfp8.Fp8DotGeneral`), `own`
(`jaxfp8.linen.Dense`), `fused` (`jaxfp8.linen.GatedMLP`), `named` (`bf16` with a rule
that makes its layers `fused`); or the name of the recipe of a `jaxfp8.linen.Dense`.

GEMMs are library calls in all of them (`xla_gpu_enable_triton_gemm=false`): there is no
autotuning without a GPU, and XLA's default would be Triton kernels with tiles that
nobody would run. `bf16, Triton` and `flax, Triton` show what that default changes.
`own, xla` is `own` under `implementation("xla")`, and `, bf16 sums` are layers whose
recipe has `wgrad_dtype=bfloat16`. Gradients are as `jaxfp8.grad` takes
them, those of `own, bare` as `jax.grad`. `--quickly` leaves machine code unoptimized:
the same counts in less time.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8
from jaxfp8.ops import _ffi

from . import count, hlo, timeline

DENSES = {
    "bf16": nn.Dense,
    "flax": functools.partial(nn.Dense, dot_general_cls=nn.Fp8DirectDotGeneralOp),
    "drop-in": functools.partial(nn.Dense, dot_general_cls=jaxfp8.Fp8DotGeneral),
    "own": jaxfp8.linen.Dense,
}
RECIPES = {
    "delayed": jaxfp8.DelayedScaling(),
    "current": jaxfp8.Float8CurrentScaling(),
    "row-wise": jaxfp8.Float8RowwiseScaling(),
    "block": jaxfp8.Float8BlockScaling(),
    "block, power of two": jaxfp8.Float8BlockScaling(power_2_scale=True),
    "MXFP8": jaxfp8.MXFP8BlockScaling(),
    "static": jaxfp8.StaticScaling(224.0, 224.0, 1.0),
    "delayed, wgrad in bf16": jaxfp8.ByProduct(
        jaxfp8.DelayedScaling(), jaxfp8.DelayedScaling()
    ),
    "one for each product": jaxfp8.ByProduct(
        jaxfp8.StaticScaling(224.0, 224.0, 1.0),
        jaxfp8.DelayedScaling(),
        jaxfp8.Float8BlockScaling(),
    ),
}
MLPS = {"fused": None, "fused, FP8 kept": jaxfp8.DelayedScaling(fp8_residuals=True)}
NAMED = jaxfp8.linen.GatedMLP.of(gate="gate", up="up", down="down")
LIBRARY_GEMMS = {"xla_gpu_enable_triton_gemm": False}
QUICKLY = {"xla_backend_optimization_level": 0}
TRITON = ", Triton"
XLA = ", xla"
BARE = ", bare"
NARROW = ", bf16 sums"
AXES = ("fsdp", "tp")
TOKENS, WIDTH, HIDDEN, LAYERS = 8192, 4096, 14336, 8
STATE = "_overwrite_with_gradient"


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` of separate layers; the candidate `fused` is one
    layer.
    """

    candidate: str
    hidden: NamedSharding | None = None  # where hidden activations lie

    @nn.compact
    def __call__(self, x):
        if self.candidate in MLPS:
            recipe = MLPS[self.candidate]
            return jaxfp8.linen.GatedMLP(
                HIDDEN, recipe=recipe, use_bias=False, dtype=jnp.bfloat16, name="mlp"
            )(x)
        dense = functools.partial(
            DENSES[self.candidate], use_bias=False, dtype=jnp.bfloat16
        )
        hidden = nn.silu(dense(HIDDEN, name="gate")(x)) * dense(HIDDEN, name="up")(x)
        if self.hidden is not None:
            hidden = jax.lax.with_sharding_constraint(hidden, self.hidden)
        return dense(x.shape[-1], name="down")(hidden)


class Layers(nn.Module):
    """A scan over `LAYERS` residual MLPs with parameters and state of their own."""

    candidate: str
    policy: Any = None  # of remat; None is no remat

    @nn.compact
    def __call__(self, x):
        layer = (
            GatedMLP
            if self.policy is None
            else nn.remat(GatedMLP, policy=self.policy, prevent_cse=False)
        )
        scanned = nn.scan(
            lambda layer, x, _: (x + layer(x), None),
            variable_axes={"params": 0, STATE: 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return scanned(layer(self.candidate, name="layer"), x, None)[0]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program for each candidate.

    Attributes:
        model: candidate -> module.
        shape: of its input.
        candidates: whose programs there are.
        mesh: the sizes of the axes "fsdp" and "tp".
        kernels: name of a layer -> PartitionSpec of its kernel.
        hidden: PartitionSpec of a GatedMLP's hidden activations, where it needs to be
            said.
        reads: the arguments whose reads are counted.
        profiled: compile once more, with a profile of the first program.
    """

    model: Callable
    shape: tuple[int, ...] = (TOKENS, WIDTH)
    candidates: tuple[str, ...] = tuple(DENSES)
    mesh: tuple[int, int] = (1, 1)
    kernels: Callable[[str], P] = lambda name: P()
    hidden: P | None = None
    reads: tuple[str, ...] = ()
    profiled: bool = False


HEADS = {"query": 4096, "key": 1024, "value": 1024}  # columns; queries are grouped


class Projections(nn.Module):
    """Three layers that multiply one x."""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        q, k, v = (dense(n, name=name)(x) for name, n in HEADS.items())
        return q * jnp.tile(k + v, (1, 4))


def projections(candidate):
    """The layers apart, or as a rule makes them one product."""
    rules = {
        "apart": (".*", jaxfp8.DelayedScaling()),
        "by rule": ("", jaxfp8.linen.Dense.of(*HEADS)),
    }
    return jaxfp8.quantize(Projections(), [rules[candidate]])


def dense(features, use_bias=False):
    return lambda candidate: DENSES[candidate](
        features, use_bias=use_bias, dtype=jnp.bfloat16
    )


def of_recipe(candidate):
    if candidate in DENSES:
        return dense(8192)(candidate)
    return jaxfp8.linen.Dense(
        8192, recipe=RECIPES[candidate], use_bias=False, dtype=jnp.bfloat16
    )


def layers(theirs=None, ours=None):
    """Layers whose remat has one policy where products are `dot_general`s, another
    where they are ours; or no remat.
    """

    def model(candidate):
        if candidate == "named":
            return jaxfp8.quantize(Layers("bf16", ours), [("layer", NAMED)])
        return Layers(candidate, theirs if candidate in ("bf16", "flax") else ours)

    return model


_POLICIES = jax.checkpoint_policies
_MLPS = (*DENSES, "fused")
_OF_DENSE = ("x", "['kernel']", "grad")


def _rows(name):
    return P("fsdp")


def _columns_then_rows(name):
    return P("tp") if name == "down" else P(None, "tp")


GROUPS = {
    "dense": {
        "dense": Case(
            dense(8192),
            (8192, 8192),
            (*DENSES, "bf16" + TRITON, "flax" + TRITON, "drop-in" + XLA, "own" + XLA),
            reads=_OF_DENSE,
        ),
        "dense with bias": Case(
            dense(8192, use_bias=True), (8192, 8192), reads=_OF_DENSE
        ),
        "small dense": Case(dense(1024), (2048, 1024), reads=_OF_DENSE),
        "gated mlp": Case(GatedMLP, candidates=_MLPS),
    },
    "recipes": {
        "dense by recipe": Case(
            of_recipe, (8192, 8192), ("bf16", *RECIPES), reads=_OF_DENSE
        ),
        "on eight devices": Case(
            of_recipe, (8 * 8192, 8192), ("row-wise", "block", "MXFP8"), mesh=(8, 1)
        ),
        "projections": Case(projections, candidates=("apart", "by rule")),
    },
    "blackwell": {
        "dense by recipe": Case(
            of_recipe,
            (8192, 8192),
            ("delayed", "block", "block, power of two", "MXFP8"),
        ),
    },
    "layers": {
        "scan": Case(
            layers(), candidates=(*_MLPS, "fused, FP8 kept", "own" + BARE, "named")
        ),
        "scan, nothing saved": Case(
            layers(_POLICIES.nothing_saveable, _POLICIES.nothing_saveable),
            candidates=_MLPS,
        ),
        "scan, products saved": Case(
            layers(
                _POLICIES.dots_saveable, jaxfp8.checkpoint_policies.save_fp8_residuals
            ),
            candidates=_MLPS,
        ),
    },
    "sharded": {
        "fsdp-8": Case(
            GatedMLP, (8 * TOKENS, WIDTH), _MLPS, mesh=(8, 1), kernels=_rows
        ),
        "dp x tp": Case(
            GatedMLP,
            (4 * TOKENS, WIDTH),
            mesh=(4, 2),
            kernels=_columns_then_rows,
            hidden=P("fsdp", "tp"),
        ),
        "fsdp-8 scan": Case(
            layers(),
            (8 * TOKENS, WIDTH),
            (*_MLPS, "own" + BARE, "own" + NARROW, "fused" + NARROW),
            mesh=(8, 1),
            kernels=_rows,
            profiled=True,
        ),
    },
}


@functools.cache
def gpus(name, sizes):
    """A mesh of GPUs that nobody needs to have: `name`.txtpb describes one."""
    # nothing runs on them: the build may have code for one GPU alone
    _ffi.cuda_architectures = list
    description = pathlib.Path(__file__).with_name(f"{name}.txtpb").read_text()
    devices = sizes[0] * sizes[1]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{devices}"
    )
    return topologies.make_mesh(topo=topology, mesh_shape=sizes, axis_names=AXES)


def on_one(tree):
    """The arrays of a tree as shapes on one H200."""
    sharding = NamedSharding(gpus("h200", (1, 1)), P())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
    )


def training_step(forward):
    """Forward and backward of `forward(variables, x)`, as where a loss is between them:
    otherwise XLA fuses parts of the backward into the forward.
    """

    def step(variables, x, grad):
        y, vjp = jax.vjp(forward, variables, x)
        y, grad = jax.lax.optimization_barrier((y, grad))
        return y, vjp(grad)

    return step


def profiled(lowered, options, text: str) -> str:
    """The program compiled once more, as JAX does with `JAX_ENABLE_PGLE=true` after it
    measured the first one; here the time line's figures are the profile.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".pbtxt") as file:
        file.write(timeline.profile(hlo.parse(text)))
        file.flush()
        given = {"xla_gpu_pgle_profile_file_or_directory_path": file.name}
        return lowered.compile(options | given).as_text()


def report(case: Case, candidate: str, quickly=False, gpu="h200") -> dict:
    """What is in the program: forward and backward of the model, all gradients and the
    next state.
    """
    if candidate.endswith(XLA):
        with jaxfp8.ops.implementation("xla"):
            return report(case, candidate.removesuffix(XLA), quickly, gpu)
    if candidate.endswith(NARROW):
        with jaxfp8.autocast(jaxfp8.DelayedScaling(wgrad_dtype=jnp.bfloat16)):
            return report(case, candidate.removesuffix(NARROW), quickly, gpu)
    is_shared = not candidate.startswith("flax") and not candidate.endswith(BARE)
    candidate = candidate.removesuffix(BARE)
    model = case.model(candidate.removesuffix(TRITON))
    mesh = gpus(gpu, case.mesh)
    if case.hidden is not None:
        model = model.clone(hidden=NamedSharding(mesh, case.hidden))

    def placed(spec, leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    def of_variable(path, leaf):
        names = [getattr(key, "key", "") for key in path]
        spec = (
            case.kernels(names[-2]) if names[-1] == "kernel" and len(names) > 2 else P()
        )
        # Of a layer's own dimensions: a loop's kernels are stacked, that of GatedMLP's
        # `wi` is [k, 2, n].
        return (
            placed(
                P(*(None,) * (leaf.ndim - (3 if names[-2] == "wi" else 2)), *spec), leaf
            )
            if spec
            else placed(P(), leaf)
        )

    def forward(variables, x):
        return (
            model.apply(jaxfp8.max_grad(variables), x)
            if is_shared
            else model.apply(variables, x)
        )

    step = training_step(forward)
    x = placed(P("fsdp"), jax.ShapeDtypeStruct(case.shape, jnp.bfloat16))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map_with_path(of_variable, variables)
    where = (
        x.sharding,
        (jax.tree.map(lambda leaf: leaf.sharding, variables), x.sharding),
    )
    lowered = jax.jit(step, out_shardings=where).lower(variables, x, x)
    options = ({} if candidate.endswith(TRITON) else LIBRARY_GEMMS) | (
        QUICKLY if quickly else {}
    )
    start = time.perf_counter()
    compiled = lowered.compile(options)
    seconds = time.perf_counter() - start
    residuals = count.residual_bytes(forward, variables, x)
    text = compiled.as_text()
    others = {}
    if case.profiled:
        others["profiled"] = timeline.summary(profiled(lowered, options, text))
    return (
        count.summary(text, case.reads)
        | others
        | {
            "timeline": timeline.summary(text),
            "operations": count.stablehlo_operations(lowered.as_text()),
            "residual_bytes": residuals,
            "state_bytes": count.total_bytes(variables.get(STATE, {})),
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "compile_seconds": seconds,
        }
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--quickly", action="store_true")
    parser.add_argument("--gpu", choices=("h200", "b200"), default="h200")
    args = parser.parse_args()
    # starts the compiler, so that no case pays for it
    report(GROUPS["dense"]["small dense"], "bf16", True, args.gpu)
    found = {}
    for group in args.groups:
        for name, case in GROUPS[group].items():
            found[name] = {
                candidate: report(case, candidate, args.quickly, args.gpu)
                for candidate in case.candidates
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
