"""The language model on a mesh: weights, gradients and optimizer state cut over all
devices (FSDP), in bf16 and in FP8.

FP8 needs no code of its own on a mesh: the code says where arrays lie (`sharding`, and
one line of `LanguageModel`), and XLA cuts the program. An FP8 layer quantizes its shard
of a kernel and sends the codes; its scales are the same on every device. A checkpoint
restores onto any mesh, with its FP8 state.

On a CPU the program makes eight devices; with GPUs it uses all GPUs.
"""

import argparse
import collections
import functools
import hashlib
import math
import pathlib
import re
import sys
import time
from typing import Any

import _report
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from _data import Corpus
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from language_model import LAYERS, LENGTH, WIDTH, Block, loss_fn, make_optimizer
from tqdm import tqdm

import jaxfp8

ARMS = {"bf16": None, "jaxfp8": jaxfp8.Fp8DotGeneral}


class LanguageModel(nn.Module):
    """The model of language_model.py, with one more line, which cuts activations along
    the batch.
    """

    vocabulary: int
    dot_general_cls: Any
    batch_sharding: NamedSharding

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=jnp.bfloat16)
        x = embed(self.vocabulary, name="embed")(tokens)
        x = x + embed(LENGTH, name="position")(jnp.arange(tokens.shape[1]))
        # Cut activations along the batch. Without this line XLA may cut them like the
        # embedding, along the features.
        x = jax.lax.with_sharding_constraint(x, self.batch_sharding)
        for i in range(LAYERS):
            x = Block(self.dot_general_cls, name=f"block{i}")(x)
        x = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        return nn.Dense(self.vocabulary, dtype=jnp.bfloat16, name="logits")(x).astype(
            jnp.float32
        )


def make_mesh(shape):
    """Make a mesh: copies of the model along `data`, each cut along `fsdp`; by default
    one copy on all devices.
    """
    return jax.make_mesh(
        shape or (1, jax.device_count()),
        ("data", "fsdp"),
        axis_types=(AxisType.Auto,) * 2,
    )


def batch_sharding(mesh):
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def sharding(mesh, x):
    """Cut an array along its largest dimension that `fsdp` divides; copy small arrays,
    such as all FP8 state.
    """
    spec = [None] * x.ndim
    divisible = [d for d in range(x.ndim) if x.shape[d] % mesh.shape["fsdp"] == 0]
    if x.size >= 2**14 and divisible:
        spec[max(divisible, key=lambda d: x.shape[d])] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*spec))


def create(arm, vocabulary, seed, steps, mesh):
    """Make a training state in the shardings of `sharding`; parameters are the same for
    every arm and mesh.
    """
    model, optimizer = (
        LanguageModel(vocabulary, ARMS[arm], batch_sharding(mesh)),
        make_optimizer(steps),
    )

    def init():
        variables = model.init(
            jax.random.key(seed), jnp.zeros((mesh.size, LENGTH), jnp.int32)
        )
        train = jaxfp8.linen.TrainState.create(
            apply_fn=model.apply, params=variables, tx=optimizer
        )
        # Flax starts with a Python int, which no device holds
        return train.replace(step=jnp.int32(0))

    shardings = jax.tree.map(functools.partial(sharding, mesh), jax.eval_shape(init))
    return jax.jit(init, out_shardings=shardings)()


def make_step(train, mesh):
    """Return the jitted training step, whose results have the shardings of `train`."""

    def step(train, batch):
        loss, grads = jax.value_and_grad(loss_fn)(train.params, train.apply_fn, batch)
        return train.apply_gradients(grads=grads), loss

    kept = jax.tree.map(lambda x: x.sharding, train)
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(kept, NamedSharding(mesh, PartitionSpec())),
    )


@jax.jit
def mean_loss(train, batches):
    return jax.lax.map(
        functools.partial(loss_fn, train.params, train.apply_fn), batches
    ).mean()


def save(checkpointer, folder, trains):
    for name, train in trains.items():
        checkpointer.save(folder / name, train, force=True)
    checkpointer.wait_until_finished()


def restore(checkpointer, folder, trains):
    """Restore the saved states, which may be from another mesh, to the shardings of
    `trains`.
    """
    return {
        name: checkpointer.restore(
            folder / name, jax.tree.map(ocp.utils.to_shape_dtype_struct, train)
        )
        for name, train in trains.items()
    }


def digest(train):
    """Return eight letters of a hash of all bits of a training state."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(train)):
        sha.update(np.ascontiguousarray(leaf).tobytes())
    return sha.hexdigest()[:8]


def show(what, trains):
    tqdm.write(
        " ".join(
            [what, *(f"{name} {digest(train)}" for name, train in trains.items())]
        ),
        file=sys.stdout,
    )


def collectives(program):
    """Count the bytes that the collectives of a compiled program give to each device,
    by kind and dtype.
    """
    moved = collections.Counter()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for types, kind in re.findall(
        rf" = (\S+|\(.*?\)) ({kinds})(?:-done)?\(", re.sub(r"/\*.*?\*/", "", program)
    ):
        for dtype, bits, shape in re.findall(r"([a-z]+(\d+)\w*)\[([\d,]*)\]", types):
            moved[f"{kind} {dtype}"] += (
                int(bits)
                // 8
                * math.prod(int(size) for size in shape.split(",") if size)
            )
    return moved


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--mesh",
        metavar="DATAxFSDP",
        help="4x2, 2x4, 8; by default one copy cut over all devices",
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=16,
        help=f"windows of {LENGTH} characters a step (default: 16)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and batches (default: 0)"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)"
    )
    parser.add_argument(
        "--checkpoint",
        default="fsdp_checkpoint",
        help="saved halfway, here (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint, on this mesh"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="4 steps on 8 windows: does it run at all?"
    )
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.batch = 4, 8
    if args.mesh:
        *data, fsdp = args.mesh.split("x")
        if len(data) > 1 or not all(
            size.isdecimal() and int(size) for size in (*data, fsdp)
        ):
            parser.error(
                f"--mesh: expected DATAxFSDP or FSDP, such as 4x2 or 8, got {args.mesh}"
            )
        args.mesh = (int(data[0]) if data else 1, int(fsdp))
    if args.steps < 4 or args.batch < 1:
        parser.error("--steps has to be 4 or more, --batch 1 or more")
    return args


def main():
    args = parse_arguments()
    jax.config.update("jax_num_cpu_devices", math.prod(args.mesh) if args.mesh else 8)
    mesh, corpus, folder = (
        make_mesh(args.mesh),
        Corpus(),
        pathlib.Path(args.checkpoint).absolute(),
    )
    data, fsdp = mesh.devices.shape
    print(
        f"{mesh.devices.flat[0].device_kind}, {mesh.size} devices: {data} x a model "
        f"cut into {fsdp}"
    )
    if args.batch % mesh.size:
        sys.exit(f"--batch has to be a multiple of {mesh.size}, the number of devices")

    trains = {
        name: create(name, len(corpus.vocabulary), args.seed, args.steps, mesh)
        for name in args.arms
    }
    checkpointer, start = ocp.StandardCheckpointer(), 0
    if args.resume:
        trains = restore(checkpointer, folder, trains)
        show(f"restored from {folder.name}:", trains)
        start = int(trains[args.arms[0]].step)
        if start != args.steps // 2:
            sys.exit(
                f"--steps: the checkpoint is of a run of {2 * start} steps or "
                f"{2 * start + 1}, got {args.steps}"
            )
    batches = corpus.random_batches(args.seed, args.steps, args.batch, LENGTH)
    batches = [jax.device_put(batch, batch_sharding(mesh)) for batch in batches]
    steps = {}
    for name, train in trains.items():
        steps[name] = make_step(train, mesh).lower(train, batches[0]).compile()
        moved = sorted(collectives(steps[name].as_text()).items())
        print(
            f"{name:8} one step moves",
            ", ".join(f"{kind} {size / 2**20:.2f} MiB" for kind, size in moved),
        )

    runs = {name: _report.Run() for name in trains}
    for i in tqdm(range(start, args.steps), unit="step", dynamic_ncols=True):
        if i == args.steps // 2 and not args.resume:
            save(checkpointer, folder, trains)
            show(f"saved in {folder.name}:", trains)
        for name, run in runs.items():
            clock = time.perf_counter()
            trains[name], loss = steps[name](trains[name], batches[i])
            run.train_losses.append(float(loss))
            run.step_ms.append(1e3 * (time.perf_counter() - clock))
    validation = corpus.validation_batches(
        args.batch, LENGTH, limit=2 if args.tiny else None
    )
    validation = jax.device_put(
        validation, NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))
    )
    for name, train in trains.items():
        runs[name].validation.append((args.steps, float(mean_loss(train, validation))))
    show("trained:", trains)
    print(_report.table(_report.summarize([runs])))


if __name__ == "__main__":
    main()
