"""The language model as a pipeline: four stages of one block each, on different
devices, in bf16 and in FP8.

A batch is cut into microbatches. In each tick all stages work at once, each on another
microbatch (`jax.vmap` over stages, whose weights lie on different devices), and then
hand their results to the next stage. FP8 needs no code of its own: weights are stacked,
so the FP8 state is stacked too, and each stage has its own state, with the largest
amaxes of all microbatches.

On a CPU the program makes eight devices; with GPUs it uses all GPUs.
"""

import functools
import math
import time
from typing import Any

import _options
import _report
import flax.linen as nn
import jax
import jax.numpy as jnp
from _data import Corpus
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from language_model import LENGTH, WIDTH, Block, loss_fn, make_optimizer
from tqdm import tqdm

import jaxfp8

STAGES, MICROBATCHES = 4, 4
ARMS = {"bf16": None, "jaxfp8": jaxfp8.Fp8DotGeneral}
STATE = jaxfp8.OVERWRITE_WITH_GRADIENT


class LanguageModel(nn.Module):
    """The model of language_model.py with blocks as stages; without a mesh stages run
    in order, on whole batches.
    """

    vocabulary: int
    dot_general_cls: Any
    mesh: Any = None

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=jnp.bfloat16)
        x = embed(self.vocabulary, name="embed")(tokens)
        x = x + embed(LENGTH, name="position")(jnp.arange(tokens.shape[1]))
        x = self.in_order(x) if self.mesh is None else self.in_a_pipeline(x)
        x = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        return nn.Dense(self.vocabulary, dtype=jnp.bfloat16, name="logits")(x).astype(
            jnp.float32
        )

    def in_order(self, x):
        stacked = {
            "variable_axes": {"params": 0, STATE: 0},
            "split_rngs": {"params": True},
            "length": STAGES,
        }
        x, _ = nn.scan(lambda block, x: (block(x), None), **stacked)(
            Block(self.dot_general_cls, name="stages"), x
        )
        return x

    def in_a_pipeline(self, x):
        stacked = {
            "variable_axes": {"params": 0, STATE: 0},
            "split_rngs": {"params": True},
        }
        stages = nn.vmap(Block, **stacked)(self.dot_general_cls, name="stages")

        def tick(stages, held, entering):
            # each stage takes the result of the stage before
            held = jnp.roll(held, 1, axis=0).at[0].set(entering)
            held = jax.lax.with_sharding_constraint(
                held, NamedSharding(self.mesh, PartitionSpec("stage", "data"))
            )
            held = stages(held)
            return held, held[-1]

        # Each device cuts its own rows. Stages without a microbatch compute on zeros: a
        # block without biases gives zeros, which do not change amaxes.
        rows = x.reshape(-1, MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)
        entering = jnp.concatenate([rows, jnp.zeros_like(rows[: STAGES - 1])])
        ticks = nn.scan(
            tick, variable_broadcast=("params", STATE), split_rngs={"params": False}
        )
        _, left = ticks(stages, jnp.zeros((STAGES, *rows.shape[1:]), x.dtype), entering)
        return left[STAGES - 1 :].swapaxes(0, 1).reshape(x.shape)


def make_mesh():
    """Make a mesh: stages along one axis, copies of the pipeline along the other."""
    stages = math.gcd(STAGES, jax.device_count())
    return jax.make_mesh(
        (stages, jax.device_count() // stages),
        ("stage", "data"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def sharding(mesh, path, x):
    """Cut weights, moments and FP8 state of stages along their first dimension, and
    copy all other arrays.
    """
    of_stages = any(getattr(key, "key", None) == "stages" for key in path)
    return NamedSharding(mesh, PartitionSpec("stage") if of_stages else PartitionSpec())


def create(arm, vocabulary, seed, steps, mesh):
    """Make a training state in the shardings of `sharding`; parameters are the same in
    every arm.
    """
    pipeline, in_order = (
        LanguageModel(vocabulary, ARMS[arm], where) for where in (mesh, None)
    )

    def init():
        variables = in_order.init(
            jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32)
        )
        return jaxfp8.linen.TrainState.create(
            apply_fn=pipeline.apply, params=variables, tx=make_optimizer(steps)
        )

    shardings = jax.tree_util.tree_map_with_path(
        functools.partial(sharding, mesh), jax.eval_shape(init)
    )
    return jax.jit(init, out_shardings=shardings)()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(train, batch):
    loss, grads = jax.value_and_grad(loss_fn)(train.params, train.apply_fn, batch)
    return train.apply_gradients(grads=grads), loss


@functools.partial(jax.jit, static_argnums=0)
def mean_loss(apply_fn, params, batches):
    return jax.lax.map(functools.partial(loss_fn, params, apply_fn), batches).mean()


def parse_arguments():
    return _options.parse(__doc__, ARMS, steps=60, batch=8, tiny_batch=8, length=LENGTH)


def main():
    args = parse_arguments()
    jax.config.update("jax_num_cpu_devices", 8)
    mesh, corpus = make_mesh(), Corpus()
    stages, copies = mesh.devices.shape
    print(
        f"{mesh.size} devices: {STAGES} stages on {stages} x {copies}, {MICROBATCHES} "
        "microbatches"
    )
    if args.batch % (MICROBATCHES * copies):
        raise SystemExit(
            f"--batch has to be a multiple of {MICROBATCHES * copies}: microbatches x "
            "copies"
        )

    vocabulary = len(corpus.vocabulary)
    trains = {
        name: create(name, vocabulary, args.seed, args.steps, mesh)
        for name in args.arms
    }
    runs = {name: _report.Run() for name in args.arms}
    over_copies = NamedSharding(mesh, PartitionSpec("data"))
    batches = corpus.random_batches(args.seed, args.steps, args.batch, LENGTH)
    for batch in tqdm(batches, total=args.steps, unit="step", dynamic_ncols=True):
        batch = jax.device_put(batch, over_copies)
        for name, run in runs.items():
            start = time.perf_counter()
            trains[name], loss = train_step(trains[name], batch)
            run.train_losses.append(float(loss))
            run.step_ms.append(1e3 * (time.perf_counter() - start))

    validation = corpus.validation_batches(
        args.batch, LENGTH, limit=2 if args.tiny else 20
    )
    in_order = {}
    for name, train in trains.items():
        runs[name].validation.append(
            (args.steps, float(mean_loss(train.apply_fn, train.params, validation)))
        )
        whole = LanguageModel(vocabulary, ARMS[name])
        in_order[name] = float(
            mean_loss(whole.apply, jax.device_get(train.params), validation)
        )
    print(_report.table(_report.summarize([runs])))
    print(
        "without the pipeline:",
        ", ".join(f"{name} {loss:.4f}" for name, loss in in_order.items()),
    )


if __name__ == "__main__":
    main()
