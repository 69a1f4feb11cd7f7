"""Whole models in training: README's conversion and trainer beside bf16 and Flax's FP8.

An arm's parameters, gradients and moments take 16 bytes a parameter: 24 GiB of an 80 GB
GPU before any activation. So arms share the device in turns. A turn makes the state of
its arm anew, from one seed, takes `UNTIMED` steps, takes the timed ones without
waiting, and frees the state. All turns have the same batches.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import _gpu_models as models
import jax
import numpy as np
import optax
from _compare_corpus import Corpus
from _gpu_answers import expect_close
from _gpu_layers import memory_mib
from _hlo_gemms import gemms
from _timing import Timing
from flax.training.train_state import TrainState

import jaxfp8

# The reference is first.
ARMS = (models.BF16, models.OWN, models.QUANTIZE, models.FLAX)
LLAMA = models.Sizes(4096, 32, 8, 14336, 32_768, layers=6)
TINY = models.Sizes(64, 4, 2, 128, 128, layers=2)
# With moments in f32. The rate grows from 0, so that first losses can be compared.
TX = optax.adam(optax.linear_schedule(0.0, 1e-4, 50))
UNTIMED = 2
# How many losses are compared with the reference's, and how far each may be off, in
# parts of it.
FIRST, LOSS_LIMIT = 5, 0.03
# The same of the first moment of a kernel whose gradient comes through all blocks. Two
# bits of e5m2 in products in a row are a quarter on a small model, and delayed scaling
# loses first gradients; a gradient of something else gives more than 1. With other
# flags an arm differs by the order of sums.
MOMENT_LIMIT, FLAGS_LIMIT = 0.75, 0.1
NO_TRITON = models.COMPILERS[", no triton"]
NO_ZEROS = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}


@dataclasses.dataclass
class Arm:
    """An arm, compiled.

    Attributes:
        make: a function that makes the state.
        step: `(state, batch) -> (state, loss)`; gives the state away.
        facts: facts for the row.
        seconds: of a step, by turn.
        host: seconds until a step's call returned.
        losses, moment: of the first turn.
    """

    make: Callable
    step: Callable
    facts: dict
    seconds: list = dataclasses.field(default_factory=list)
    host: list = dataclasses.field(default_factory=list)
    losses: list = dataclasses.field(default_factory=list)
    moment: jax.Array | None = None

    def turn(self, batches) -> None:
        state, losses, host = self.make(), [], []
        for i, batch in enumerate(batches):
            if i == UNTIMED:
                jax.block_until_ready(state)
                start = time.perf_counter()
            called = time.perf_counter()
            state, loss = self.step(state, batch)
            host.append(time.perf_counter() - called)
            losses.append(loss)
        jax.block_until_ready(state)
        timed = len(batches) - UNTIMED
        self.seconds.append((time.perf_counter() - start) / timed)
        self.host += host[UNTIMED:]
        if not self.losses:
            self.losses = [float(loss) for loss in losses]
            moments = optax.tree.get(state.opt_state, "mu")
            for path, leaf in jax.tree.leaves_with_path(moments):
                if self.moment is None and "Dense_0" in jax.tree_util.keystr(path):
                    self.moment = leaf[..., :64]

    def row(self, tokens: int) -> dict:
        us = 1e6 * statistics.median(self.seconds)
        several = len(self.seconds) > 1
        tenth = max(1, len(self.losses) // 10)
        stats = jax.devices()[0].memory_stats() or {}
        return self.facts | {
            "us": us,
            "spread": Timing(tuple(self.seconds)).spread if several else 0.0,
            "tokens_a_second": 1e6 * tokens / us,
            "host_ms": 1e3 * statistics.median(self.host),
            "steps": len(self.host),
            "loss": float(np.mean(self.losses[-tenth:])),
            "losses": self.losses,
            # of all arms together; `memory_mib` is that of one arm
            "peak_of_the_process_mib": stats.get("peak_bytes_in_use", 0) / 2**20,
        }


def llama(name, tiny=False, in_a_scan=False):
    """Return the model of an arm."""
    on_gpu = jax.default_backend() == "gpu"
    attention = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        implementation="cudnn" if on_gpu else None,
    )
    return models.llama(name, TINY if tiny else LLAMA, attention, in_a_scan)


def loss_fn(params, apply_fn, batch):
    """Return the mean cross entropy of the next characters of int32 `[batch,
    length + 1]`.
    """
    logits = apply_fn(params, batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.mean()


def train_step(state, batch):
    """Take README's step; return the state and the loss."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), loss


def create(name, model, batch):
    """Make the trainer's state of an arm; parameters have the same values in every
    arm.
    """

    def init(model):
        return model.init(jax.random.key(0), batch[:, :-1])

    variables = init(model)
    if name == models.OWN:
        params = init(model.clone(name_of_dense=models.BF16))["params"]
        variables |= {"params": models.with_fused_mlps(params)}
    cls = TrainState if models.is_peer(name) else jaxfp8.linen.TrainState
    return cls.create(apply_fn=model.apply, params=variables, tx=TX)


def compile_arm(make, batch, compiler) -> Arm:
    step = jax.jit(train_step, donate_argnums=0, compiler_options=compiler)
    # A call of `step` takes the same program.
    compiled = step.lower(jax.eval_shape(make), batch).compile()
    text = compiled.as_text()
    return Arm(make, step, {"gemms": gemms(text), "memory_mib": memory_mib(compiled)})


def check(name, arm, reference, limit) -> None:
    """Raise an AssertionError unless the first losses and the moment are near those of
    the reference.
    """
    pairs = list(zip(arm.losses[:FIRST], reference.losses, strict=False))
    if not all(abs(got - want) < LOSS_LIMIT * want for got, want in pairs):
        raise AssertionError(
            f"{name}: losses, and those expected: {pairs}, expected within "
            f"{LOSS_LIMIT:.0%}"
        )
    expect_close(f"{name}: moment", arm.moment, reference.moment, limit)


def _train(options, length, turns, steps, compilers, in_a_scan=False):
    """Yield the rows and errors so far, after each turn of an arm."""
    batch = 1 if length == 1024 else 2
    # XLA's CPU takes half of the time for a program that it does not optimize.
    base = {"xla_backend_optimization_level": 0} if options.tiny else NO_TRITON
    texts = Corpus().random_batches(0, UNTIMED + steps, batch, options.size(length))
    batches = [jax.device_put(text) for text in texts]
    makes = {}
    for name in ARMS:
        model = llama(name, options.tiny, in_a_scan)
        make = functools.partial(create, name, model, batches[0])
        makes[name] = jax.jit(make, compiler_options=base)
    arms, rows, errors = {}, {}, {}
    for _ in range(turns):
        for name in ARMS:
            for suffix, flags in compilers.items():
                arm = name + suffix
                if arm in errors:
                    continue
                try:
                    if arm not in arms:
                        compiler = base | flags
                        arms[arm] = compile_arm(makes[name], batches[0], compiler)
                    arms[arm].turn(batches)
                    if suffix:
                        check(arm, arms[arm], arms[name], FLAGS_LIMIT)
                    else:
                        check(arm, arms[arm], arms[models.BF16], MOMENT_LIMIT)
                    rows[arm] = arms[arm].row(batch * options.size(length))
                except Exception as error:  # the others go on
                    errors[arm] = f"{type(error).__name__}: {error}"[:500]
                yield rows, errors


def model(options):
    """Time a training step of six layers of Llama 8B on two sequences of 4096."""
    turns, steps = options.size(4, 1), options.size(5, 2)
    return _train(options, 4096, turns, steps, {"": {}})


def losses(options):
    """Train that model for 200 steps of 1024 characters."""
    return _train(options, 1024, 1, options.size(200, 5), {"": {}})


def scan(options):
    """Time the model as a scan, whose stacks XLA fills with zeros first, or does
    not.
    """
    compilers = {"": {}, ", no zeros": NO_ZEROS}
    turns, steps = options.size(2, 1), options.size(5, 2)
    return _train(options, 4096, turns, steps, compilers, in_a_scan=True)
