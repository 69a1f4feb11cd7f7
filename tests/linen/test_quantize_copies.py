"""A model with rules is pickled, copied, hashed and used in threads whenever the plain
model is.
"""

import concurrent.futures
import copy
import functools
import pickle
import threading
import time

import flax.linen as nn
from parametrize import each_row

import jaxfp8
from jaxfp8.linen import quantize

from .quantized import KEY, RULES, A, B, Block, D, Model, assert_same, fp8, x

try:
    import cloudpickle
except ImportError:
    cloudpickle = None


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D, name="dense")(x)


class Small(nn.Module):
    """setup, and a module that comes from outside."""

    shared: nn.Module

    def setup(self):
        self.layers = [Inner(), nn.remat(Inner)()]
        self.head = nn.Dense(5)

    def __call__(self, x):
        for layer in self.layers:
            x = self.shared(layer(x))
        return self.head(x)


class Custom(Block):
    """Pickles as it says itself; what it adds must not be lost."""

    def __getstate__(self):
        return vars(self) | {"note": "pickled"}

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return 7


class Config(nn.Module):
    """A field that does not hash, and one that does not copy."""

    sizes: object

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.sizes[0])(x)


BLOCK_RULES = [("attn/.*", A), ("mlp", B)]
LOCK = threading.Lock()
MODELS = {
    "setup": (
        Small(Inner(parent=None)),
        [("head", A), (r"layers_\d/dense", B), ("shared/.*", A)],
    ),
    "compact": (Block(), BLOCK_RULES),
    "a field": (Model(h=A), RULES),
    "remat": (nn.Sequential([nn.remat(Block)()]), [("layers_0/mlp", A)]),
    "own pickling": (Custom(), BLOCK_RULES),
    "default initializers": (nn.Dense(5), [("", A)]),  # pickle cannot
    "unhashable": (Config([3]), [("Dense_0", A)]),
    "lock": (Config(LOCK), [("Dense_0", A)]),
    "rule with a function": (
        Block(),
        [("mlp", jaxfp8.DelayedScaling(amax_compute_algo=lambda history: history[0]))],
    ),
}
COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "protocol 0": lambda model: pickle.loads(pickle.dumps(model, 0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "clone": lambda model: model.clone(),
}
if cloudpickle:
    COPIES["cloudpickle"] = lambda model: pickle.loads(cloudpickle.dumps(model))


def outcome(function, *args):
    """The result, or the type of the error."""
    try:
        return function(*args)
    except Exception as error:
        return type(error)


@each_row("copied", COPIES)
@each_row("plain, rules", MODELS)
def test_copies(plain, rules, copied):
    """What the plain model can and what its rules can, the model with rules can; what
    is equal there is equal here.
    """
    quantized = quantize(plain, rules)
    plain_copy = outcome(copied, plain)
    quantized_copy = outcome(copied, quantized)
    rules_copy = rules if copied is COPIES["clone"] else outcome(copied, rules)
    for part in (plain_copy, rules_copy):
        if isinstance(part, type):
            assert quantized_copy is part
            return
    assert isinstance(quantized_copy, type(plain)) and quantized_copy != plain_copy
    assert (quantized_copy == quantized) == (
        plain_copy == plain and rules_copy == rules
    )
    assert (type(quantized_copy) is type(quantized)) == (rules_copy == rules)
    assert same_hash(quantized_copy, quantized) == same_hash(plain_copy, plain)
    assert repr(quantized_copy) == repr(plain_copy)
    assert vars(quantized_copy).get("note") == vars(plain_copy).get("note")


def same_hash(*models):
    """Whether two models hash alike; the error where one does not hash."""
    return outcome(lambda: hash(models[0]) == hash(models[1]))


# ------------------------------------------------------------------------------ threads


def in_threads(*functions):
    """The results of functions that run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda function: function(), functions))


def test_equal_models_of_several_threads():
    class Fresh(nn.Module):
        """A class that nobody has quantized, and whose subclasses take their time."""

        def __init_subclass__(cls, **options):
            time.sleep(0.05)
            super().__init_subclass__(**options)

    barrier = threading.Barrier(4)
    models = in_threads(*[lambda: (barrier.wait(), quantize(Fresh(), RULES))[1]] * 4)
    assert len(set(map(type, models))) == 1
    assert all(model == models[0] for model in models)


class Meet(nn.Module):
    """Goes on when the models of two threads are here."""

    barrier: object
    recipe: object = None

    @nn.compact
    def __call__(self, x):
        self.barrier.wait(timeout=60)
        x = nn.Dense(D, name="dense", dot_general_cls=fp8(self.recipe))(x)
        self.barrier.wait(timeout=60)
        return x


def test_models_that_run_at_the_same_time():
    """Each has its own rules; one has none."""
    alone = threading.Barrier(1)
    wanted = [Meet(alone, recipe).init(KEY, x()) for recipe in (A, B, None)]
    barrier = threading.Barrier(3)
    models = [
        quantize(Meet(barrier), [("dense", A)]),
        quantize(Meet(barrier), [("dense", B)]),
        Meet(barrier),
    ]
    got = in_threads(*[functools.partial(model.init, KEY, x()) for model in models])
    assert_same(got, wanted)
