"""Compares the custom recipe of examples/, rotated 8-bit integers rounded without bias,
with every stock recipe.

    python benchmarks/custom_recipe.py [--json PATH] [--seeds N] [--only products ...]

Three cases, each with paired seeds: all recipes of a seed see the same tensors, weights
and batches.

- products: the three products of a layer on known tensors, beside the same products in
  f64. The figures are the dB of one product, and of the mean of 16 steps on the same
  tensors, which is the error that is left after averaging.
- gradients: the gradient of the weights of a language model that was trained a little,
  on batches of text. The reference is the same model in bf16; the figures are the dB of
  a batch, and of the mean over batches.
- regression: a linear map learned from examples without noise. The figure is the dB of
  the final f32 weights beside the true weights: a recipe cannot learn differences that
  it rounds away.

"Better by" is the custom recipe less the best stock recipe, which is chosen for each
case by its results, with the 95 % confidence interval of the paired difference over
seeds (Student's t).
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(pathlib.Path(__file__).parent)]
import custom_recipes  # noqa: E402
import language_model  # noqa: E402
from _data import Corpus  # noqa: E402
from _environment import environment, result_parser  # noqa: E402

OURS = "rotated"
RECIPES = {
    "delayed": jaxfp8.DelayedScaling(amax_history_len=16),
    "current": jaxfp8.Float8CurrentScaling(),
    "current_e4m3": jaxfp8.Float8CurrentScaling(fp8_format=jaxfp8.Format.E4M3),
    "rowwise_e4m3": jaxfp8.Float8RowwiseScaling(fp8_format=jaxfp8.Format.E4M3),
    "block": jaxfp8.Float8BlockScaling(),
    "mxfp8": jaxfp8.MXFP8BlockScaling(),
    OURS: custom_recipes.RECIPES[OURS],
}
# The two-sided 95 % quantiles of Student's t, by degrees of freedom.
T95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}
MATMUL = (((1,), (0,)), ((), ()))


def decibel(exact, got) -> float:
    return float(
        10 * np.log10(np.sum(np.square(exact)) / np.sum(np.square(got - exact)))
    )


def halves(outs) -> dict:
    """Return the dB of the last step, and of the mean over the second half of steps;
    `outs` are pairs (exact, got).
    """
    exact, got = (
        np.stack(arrays[len(arrays) // 2 :]) for arrays in zip(*outs, strict=True)
    )
    return {
        "one": decibel(exact[-1], got[-1]),
        "mean": decibel(exact.mean(0), got.mean(0)),
    }


# Products of known tensors ------------------------------------------------------------


def tensors(kind, seed, m, k, n):
    """Return x `[m, k]`, kernel `[k, n]` and grad `[m, n]` in f32: normal numbers,
    changed as `kind` says.
    """
    rng = np.random.default_rng(seed)
    x, kernel, grad = (rng.standard_normal(shape) for shape in ((m, k), (k, n), (m, n)))
    if kind == "outlier channels":  # 1 % of the columns of x are 100 times larger
        x[:, rng.choice(k, max(1, k // 100), replace=False)] *= 100
    if kind == "heavy tails":
        x, grad = rng.standard_t(3, (m, k)), rng.standard_t(3, (m, n))
    if kind == "log-normal elements":
        grad *= np.exp(2 * rng.standard_normal(grad.shape))
    if kind == "log-normal rows":  # some tokens matter far more than others
        grad *= np.exp(2 * rng.standard_normal((m, 1)))
    # wgrad contracts the rows, so no scale of a row of x.T can follow them
    if kind == "log-normal rows of both":
        x, grad = (a * np.exp(2 * rng.standard_normal((m, 1))) for a in (x, grad))
    return [a.astype(np.float32) for a in (x, kernel, grad)]


KINDS = (
    "normal",
    "outlier channels",
    "heavy tails",
    "log-normal elements",
    "log-normal rows",
    "log-normal rows of both",
)


@functools.partial(jax.jit, static_argnums=0)
def layer(recipe, x, kernel, grad, state):
    def product(x, kernel, state):
        return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)

    y, vjp = jax.vjp(product, x, kernel, state)
    return y, *vjp(grad)


def next_state(state, gradient):
    return jaxfp8.update_state(state, gradient) if jax.tree.leaves(state) else state


def products(seed, tiny):
    """Return the dB of products as
    `{kind: {product: {recipe: {"one": ..., "mean": ...}}}}`.
    """
    sizes = (64, 128, 32) if tiny else (512, 1024, 256)
    found = {}
    for kind in KINDS:
        x, kernel, grad = tensors(kind, seed, *sizes)
        wide = [a.astype(np.float64) for a in (x, kernel, grad)]
        exact = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
        found[kind] = {gemm: {} for gemm in ("fprop", "dgrad", "wgrad")}
        for name, recipe in RECIPES.items():
            state, steps = jaxfp8.init_state(recipe), []
            for _ in range(32 if jax.tree.leaves(state) else 2):
                *results, gradient = layer(recipe, x, kernel, grad, state)
                steps.append([np.asarray(result, np.float64) for result in results])
                state = next_state(state, gradient)
            for i, gemm in enumerate(found[kind]):
                found[kind][gemm][name] = halves(
                    [(exact[i], results[i]) for results in steps]
                )
    return found


# The gradient of a language model -----------------------------------------------------


def model_of(recipe, vocabulary):
    cls = (
        None
        if recipe is None
        else functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)
    )
    return language_model.LanguageModel(vocabulary, cls)


@functools.partial(jax.jit, static_argnums=0)
def gradient_step(model, variables, windows):
    return jax.grad(language_model.loss_fn)(variables, model.apply, windows)


def gradients(seed, tiny):
    """Return the dB of gradients as `{"language model": {"weights": {recipe: {"one":
    ..., "mean": ...}}}}`.
    """
    steps, count, batch = (4, 2, 2) if tiny else (100, 16, 4)
    corpus = Corpus()
    optimizer = language_model.make_optimizer(max(steps, 10))
    train = language_model.create_state(
        model_of(None, len(corpus.vocabulary)), seed, optimizer
    )
    for windows in corpus.random_batches(seed, steps, batch, language_model.LENGTH):
        train, _ = language_model.train_step(train, windows)
    params = train.params["params"]
    batches = list(
        corpus.random_batches(1000 + seed, count, batch, language_model.LENGTH)
    )

    def of_kernels(recipe):
        """Yield for each batch one array with the gradients of all kernels in FP8
        layers.
        """
        model = model_of(recipe, len(corpus.vocabulary))
        variables = {**language_model.init(model, 0), "params": params}
        for windows in batches:
            gradient = gradient_step(model, variables, windows)
            if jaxfp8.OVERWRITE_WITH_GRADIENT in variables:
                variables = jaxfp8.update_state(variables, gradient)
            leaves = jax.tree_util.tree_flatten_with_path(gradient["params"])[0]
            kernels = [
                leaf
                for path, leaf in leaves
                if "block" in path[0].key and path[-1].key == "kernel"
            ]
            yield np.concatenate(
                [np.ravel(np.asarray(leaf, np.float64)) for leaf in kernels]
            )

    exact = list(of_kernels(None))
    rows = {
        name: halves(zip(exact, of_kernels(recipe), strict=True))
        for name, recipe in RECIPES.items()
    }
    return {"language model": {"weights": rows}}


# Learning a linear map ----------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def learned(recipe, goal, x, rates):
    """Return the kernel after a step of SGD on each batch of x
    `[steps, batch, width]`.
    """

    def loss(kernel, state, x):
        y = jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)
        return jnp.sum((y - x @ goal) ** 2) / (2 * len(x))

    def step(carry, of_step):
        kernel, state = carry
        gradient, new = jax.grad(loss, argnums=(0, 1))(kernel, state, of_step[0])
        return (kernel - of_step[1] * gradient, next_state(state, new)), None

    start = jnp.zeros_like(goal), jaxfp8.init_state(recipe)
    return jax.lax.scan(step, start, (x, rates))[0][0]


def regression(seed, tiny):
    """Return the dB of trained weights beside the truth as
    `{"linear map": {"weights": {recipe: {"one": ...}}}}`.
    """
    width, batch, steps = (32, 64, 20) if tiny else (128, 256, 500)
    rng = np.random.default_rng(seed)
    truth = (rng.standard_normal((width, width)) / np.sqrt(width)).astype(np.float32)
    x = rng.standard_normal((steps, batch, width)).astype(np.float32)
    rates = (0.3 * np.cos(np.pi / 2 * np.arange(steps) / steps) ** 2).astype(np.float32)
    weights = {
        name: np.asarray(learned(recipe, truth, x, rates), np.float64)
        for name, recipe in RECIPES.items()
    }
    return {
        "linear map": {
            "weights": {
                name: {"one": decibel(truth, got)} for name, got in weights.items()
            }
        }
    }


# Results ------------------------------------------------------------------------------

CASES = {"products": products, "gradients": gradients, "regression": regression}


def summarize(case, seeds) -> list[dict]:
    """Return a row for each tensor, product and figure: means over seeds, and `OURS`
    less the best stock recipe.
    """
    rows = []
    for kind in seeds[0]:
        for gemm, of_recipes in seeds[0][kind].items():
            for figure in of_recipes[OURS]:
                each = {
                    name: [found[kind][gemm][name][figure] for found in seeds]
                    for name in of_recipes
                }
                best = max(
                    (name for name in each if name != OURS),
                    key=lambda name: np.mean(each[name]),
                )
                differences = np.subtract(each[OURS], each[best])
                half = (
                    T95[len(seeds) - 1] * differences.std(ddof=1) / np.sqrt(len(seeds))
                    if len(seeds) > 1
                    else np.nan
                )
                rows.append(
                    {
                        "case": case,
                        "tensors": kind,
                        "of": gemm,
                        "figure": figure,
                        "dB": {
                            name: round(float(np.mean(values)), 2)
                            for name, values in each.items()
                        },
                        "best_stock": best,
                        "better_by": round(float(differences.mean()), 2),
                        "confidence_95": round(float(half), 2)
                        if len(seeds) > 1
                        else None,
                    }
                )
    return rows


def line(row) -> str:
    where = f"{row['tensors']}, {row['of']}, {row['figure']}"
    interval = "" if row["confidence_95"] is None else f" +- {row['confidence_95']:.2f}"
    each = "  ".join(f"{name} {value:.1f}" for name, value in row["dB"].items())
    return (
        f"{where:38} {row['better_by']:+6.2f}{interval} dB to {row['best_stock']:13} "
        f"{each}"
    )


def main():
    parser = result_parser(__doc__)
    parser.add_argument(
        "--seeds",
        type=int,
        default=5,
        help="paired repetitions, up to 10 (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes: does it run at all?"
    )
    args = parser.parse_args()
    if not 1 <= args.seeds <= 10:
        parser.error("--seeds has to be 1 to 10")
    described, rows = environment(), []
    for case in args.only:
        found = [CASES[case](seed, args.tiny) for seed in range(args.seeds)]
        of_case = summarize(case, found)
        print(*map(line, of_case), sep="\n", flush=True)
        rows += of_case
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps(
                {"environment": described, "seeds": args.seeds, "rows": rows}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
