"""A mixture of experts on eight devices, two experts on each: in bf16, and in FP8 from
dispatch to combine.

A router sends each token to one expert. In FP8 the tokens cross the network as codes,
the experts multiply these codes, and the gradients go back in the same way: only the
lines of `experts` that have a recipe differ. Attention, router, embedding and logits
stay in bf16.

On a CPU the program makes eight devices, between which XLA sends bf16 as f32; with GPUs
it uses all GPUs.
"""

import functools
import time

import _options
import _report
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from _data import Corpus
from fsdp_language_model import collectives
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from language_model import make_optimizer
from tqdm import tqdm

import jaxfp8

LENGTH = 64  # characters of context
WIDTH, HEADS, LAYERS = 128, 4, 2
EXPERTS, HIDDEN = 16, 256
# an expert has room for twice the mean number of tokens of an expert; further tokens
# are dropped
SPARE = 2
BALANCE = 0.01  # the weight of the loss that keeps the experts equally busy
AXIS = "expert"
PICTURE = "moe_language_model.png"

RECIPE = jaxfp8.DelayedScaling(amax_history_len=16)


def _gradient_alone(role):
    return (
        jaxfp8.recipes.DelayedScalingQuantizer(jnp.float8_e5m2, amax_history_len=16)
        if role == "linear_grad_output"
        else None
    )


# The results of experts are added up, so they travel in bf16; their gradients travel as
# codes.
COMBINE = jaxfp8.CustomRecipe(_gradient_alone)
RECIPES = {"dispatch": RECIPE, "up": RECIPE, "down": RECIPE, "combine": COMBINE}
ARMS = {"bf16": dict.fromkeys(RECIPES), "jaxfp8": RECIPES}


def init(seed, vocabulary):
    """Make the parameters, which are the same in every arm."""

    def normal(name, *shape, fan_in=WIDTH):
        key = jax.random.fold_in(
            jax.random.key(seed),
            sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31,
        )
        return jax.random.normal(key, shape) * fan_in**-0.5

    params = {
        "embed": normal("embed", vocabulary, WIDTH, fan_in=1),
        "logits": normal("logits", WIDTH, vocabulary),
    }
    params["position"] = normal("position", LENGTH, WIDTH, fan_in=16)
    for i in range(LAYERS):
        params[f"block{i}"] = {
            "qkv": normal(f"qkv{i}", WIDTH, 3 * WIDTH),
            "out": normal(f"out{i}", WIDTH, WIDTH),
            "router": normal(f"router{i}", WIDTH, EXPERTS),
            "up": normal(f"up{i}", EXPERTS, WIDTH, HIDDEN),
            "down": normal(f"down{i}", EXPERTS, HIDDEN, WIDTH, fan_in=HIDDEN),
        }
    return params


def init_state(recipes):
    """Make the FP8 state of every block: of both transfers and both products."""
    return {
        f"block{i}": {
            name: recipe and jaxfp8.init_state(recipe)
            for name, recipe in recipes.items()
        }
        for i in range(LAYERS)
    }


def specs(params):
    """Return the specs of parameters: kernels of experts are cut over devices, all
    others are copied.
    """
    of_experts = ("up", "down")
    return jax.tree.map_with_path(
        lambda path, _: (
            PartitionSpec(AXIS) if path[-1].key in of_experts else PartitionSpec()
        ),
        params,
    )


def norm(x):
    return x * lax.rsqrt(
        jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + 1e-6
    ).astype(x.dtype)


def attention(params, x):
    batch, length, _ = x.shape
    qkv = (x @ params["qkv"].astype(x.dtype)).reshape(
        batch, length, 3, HEADS, WIDTH // HEADS
    )
    attended = jax.nn.dot_product_attention(*jnp.unstack(qkv, axis=2), is_causal=True)
    return attended.reshape(x.shape) @ params["out"].astype(x.dtype)


def send(x, split, concat, recipe, state):
    """Exchange the slots of experts for those of devices, or back."""
    if recipe is None:
        return lax.all_to_all(x, AXIS, split, concat, tiled=True)
    return jaxfp8.collectives.all_to_all(
        x, AXIS, split, concat, recipe=recipe, state=state, tiled=True
    )


def product(x, kernel, recipe, state):
    """Multiply the slots `[expert, slot, k]` with the matrices of the experts that this
    device has.
    """
    numbers = (((2,), (1,)), ((0,), (0,)))
    if recipe is None:
        return lax.dot_general(x, kernel.astype(x.dtype), numbers)
    # x may be a QTensor with the codes that arrived.
    return jaxfp8.dot_general(
        x,
        kernel,
        numbers,
        recipe=recipe,
        state=state,
        preferred_element_type=jnp.bfloat16,
    )


def experts(params, state, recipes, x):
    """Send tokens `[tokens, WIDTH]` to their experts; return the experts' weighted
    results, and the loss of balance.
    """
    # 1. Choose an expert for each token, and a slot of the expert; tokens that find no
    #    slot are left out.
    probabilities = jax.nn.softmax(
        (x @ params["router"].astype(x.dtype)).astype(jnp.float32)
    )
    expert, weight = jnp.argmax(probabilities, axis=-1), jnp.max(probabilities, axis=-1)
    chosen = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32)
    position = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=-1)
    slots = x.shape[0] * SPARE // EXPERTS
    place = jnp.where(position < slots, expert * slots + position, EXPERTS * slots)
    # 2. Dispatch: `[expert, slot, WIDTH]` becomes
    #    `[expert of this device, slot of every device, WIDTH]`.
    sent = (
        jnp.zeros((EXPERTS * slots, WIDTH), x.dtype)
        .at[place]
        .set(x, mode="drop")
        .reshape(EXPERTS, slots, WIDTH)
    )
    arrived = send(sent, 0, 1, recipes["dispatch"], state["dispatch"])
    # 3. Compute both products of the experts.
    hidden = jax.nn.gelu(product(arrived, params["up"], recipes["up"], state["up"]))
    y = product(hidden, params["down"], recipes["down"], state["down"])
    # 4. Combine: send the results back to the devices of the tokens.
    back = send(y, 1, 0, recipes["combine"], state["combine"])
    back = back if recipes["combine"] is None else back.dequantize(x.dtype)
    y = back.reshape(-1, WIDTH).at[place].get(mode="fill", fill_value=0)
    busy = lax.pmean(jnp.mean(chosen.astype(jnp.float32), axis=0), AXIS)
    balance = EXPERTS * jnp.sum(busy * lax.pmean(jnp.mean(probabilities, axis=0), AXIS))
    return y * weight[:, None].astype(y.dtype), balance


def loss_fn(params, state, recipes, batch):
    """Return the mean cross entropy of the next character over all devices, in nat, and
    the loss of balance.
    """
    x = (params["embed"][batch[:, :-1]] + params["position"]).astype(jnp.bfloat16)
    balance = 0
    for name, block in params.items():
        if name.startswith("block"):
            x = x + attention(block, norm(x))
            y, loss = experts(block, state[name], recipes, norm(x).reshape(-1, WIDTH))
            x, balance = x + y.reshape(x.shape), balance + loss
    logits = (norm(x) @ params["logits"].astype(x.dtype)).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
    return lax.pmean(loss, AXIS), balance


def make_step(recipes, params, optimizer, mesh):
    """Return the training step, and a function for the mean loss of batches; a batch is
    cut over all devices.
    """
    cut, everywhere = PartitionSpec(AXIS), PartitionSpec()
    places = specs(params)

    def total(params, state, batch):
        loss, balance = loss_fn(params, state, recipes, batch)
        return loss + BALANCE * balance, loss

    on_mesh = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(places, everywhere, cut)
    )
    # The gradient of the FP8 state is the next state, the same on every device.
    gradients = on_mesh(
        jax.grad(total, argnums=(0, 1), has_aux=True),
        out_specs=((places, everywhere), everywhere),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, opt_state, batch):
        (grads, new_state), loss = gradients(params, state, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (
            optax.apply_updates(params, updates),
            jaxfp8.update_state(state, new_state),
            opt_state,
            loss,
        )

    loss_of = on_mesh(
        lambda params, state, batch: loss_fn(params, state, recipes, batch)[0],
        out_specs=everywhere,
    )
    mean_loss = jax.jit(
        lambda params, state, batches: lax.map(
            functools.partial(loss_of, params, state), batches
        ).mean()
    )
    return step, mean_loss


def plot(runs, moved, path):
    """Plot training losses, and beside them the bytes that one step sends between
    devices.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.25), layout="constrained")
    for name, run in runs.items():
        # the lines of arms that agree overlap
        style = {"linewidth": 7, "alpha": 0.35} if name == "bf16" else {}
        left.plot(
            *_report.smooth(run.train_losses),
            color=_report.COLORS[name],
            label=name,
            **style,
        )
    left.set(
        title="Training loss", xlabel="step", ylabel="cross entropy (nat per character)"
    )
    left.legend(frameon=False)
    kinds = sorted({kind for sizes in moved.values() for kind in sizes})
    for i, (name, sizes) in enumerate(moved.items()):
        places = [k + 0.4 * i for k in range(len(kinds))]
        right.barh(
            places,
            [sizes[kind] / 2**20 for kind in kinds],
            0.35,
            color=_report.COLORS[name],
            label=name,
        )
    right.set(
        title="One step, each device",
        xlabel="MiB",
        yticks=range(len(kinds)),
        yticklabels=kinds,
    )
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    args = _options.parse(
        __doc__, ARMS, steps=200, batch=16, tiny_batch=8, length=LENGTH
    )
    jax.config.update("jax_num_cpu_devices", 8)
    mesh, corpus = (
        jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,)),
        Corpus(),
    )
    if args.batch % mesh.size or EXPERTS % mesh.size:
        raise SystemExit(
            f"--batch and the {EXPERTS} experts have to be multiples of {mesh.size}, "
            "the number of devices"
        )
    print(f"{mesh.size} devices, {EXPERTS // mesh.size} experts on each")

    optimizer, trains, steps, mean_losses, moved = (
        make_optimizer(args.steps),
        {},
        {},
        {},
        {},
    )
    batches = [
        jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))
        for batch in corpus.random_batches(args.seed, args.steps, args.batch, LENGTH)
    ]
    for name in args.arms:
        params = init(args.seed, len(corpus.vocabulary))
        params = jax.device_put(
            params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(params))
        )
        state = jax.device_put(
            init_state(ARMS[name]), NamedSharding(mesh, PartitionSpec())
        )
        trains[name] = (params, state, jax.jit(optimizer.init)(params))
        step, mean_losses[name] = make_step(ARMS[name], params, optimizer, mesh)
        steps[name] = step.lower(*trains[name], batches[0]).compile()
        moved[name] = collectives(steps[name].as_text())
        print(
            f"{name:8} one step moves",
            ", ".join(
                f"{kind} {n / 2**20:.3f} MiB" for kind, n in sorted(moved[name].items())
            ),
        )

    runs = {name: _report.Run() for name in args.arms}
    for batch in tqdm(batches, unit="step", dynamic_ncols=True):
        for name, run in runs.items():
            start = time.perf_counter()
            *trains[name], loss = steps[name](*trains[name], batch)
            run.train_losses.append(float(loss))
            run.step_ms.append(1e3 * (time.perf_counter() - start))

    validation = corpus.validation_batches(
        args.batch, LENGTH, limit=2 if args.tiny else 20
    )
    validation = jax.device_put(
        validation, NamedSharding(mesh, PartitionSpec(None, AXIS))
    )
    for name, (params, state, _) in trains.items():
        runs[name].validation.append(
            (args.steps, float(mean_losses[name](params, state, validation)))
        )
    print(_report.table(_report.summarize([runs])))
    plot(runs, moved, PICTURE)
    print(f"picture: {PICTURE}")


if __name__ == "__main__":
    main()
