"""A server in numpy: it computes the logits of a small transformer from a safetensors
file and its `quantization_config`.

It shares no code with the package. It quantizes activations by the scales of the file,
or finds scales as the config says. It multiplies codes exactly: a code of e4m3 is an
integer below 2**18 times 2**-9, so float64 holds a sum of fewer than 2**17 products.
"""

import ml_dtypes
import numpy as np

from convert import numpy_reader

LARGEST = 448.0


def rms_norm(x, scale):
    """Flax's RMSNorm, in float32."""
    x = x.astype(np.float32)
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return x * (scale / np.sqrt(mean + np.float32(1e-6)))


def gelu(x):
    """The approximation by tanh, in float32."""
    x = x.astype(np.float32)
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def causal_softmax(scores):
    """Softmax over the keys up to each query, in float32."""
    length = scores.shape[-1]
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Server:
    """The model of a file.

    Attributes:
        tensors: the tensors of the file, by name.
        config: the `quantization_config` that belongs to it.
        dtype: what activations are rounded to, float32 or bfloat16.
        noise: how far results of products are off, at random: another order of sums.
        activation_dtype: the format of the codes of activations.
        divides: whether activations are divided by `amax / 448`, or multiplied by
            `448 / amax`. Loaders do either; jaxfp8 multiplies.
    """

    def __init__(
        self,
        path,
        config,
        dtype=np.float32,
        noise=0.0,
        activation_dtype=ml_dtypes.float8_e4m3fn,
        divides=True,
    ):
        self.tensors = numpy_reader.read(path)
        self.config = config
        self.dtype = dtype
        self.noise = noise
        self.random = np.random.default_rng(0)
        self.activation_dtype = activation_dtype
        self.divides = divides

    def logits(self, tokens, layers, heads):
        """Logits f32 `[batch, length, vocabulary]` of tokens `[batch, length]`."""
        t = self.tensors
        length = tokens.shape[1]
        x = self.rounded(t["embed.weight"])[tokens]
        x = self.added(x, self.rounded(t["position.weight"])[:length])
        for i in range(layers):
            h = self.norm(x, f"block{i}.norm1")
            h = self.attention(self.linear(h, f"block{i}.qkv"), heads)
            x = self.added(x, self.linear(h, f"block{i}.out"))
            h = self.norm(x, f"block{i}.norm2")
            h = self.rounded(gelu(self.linear(h, f"block{i}.up")))
            x = self.added(x, self.linear(h, f"block{i}.down"))
        y = self.linear(self.norm(x, "norm"), "logits")
        return self.added(y, self.rounded(t["logits.bias"])).astype(np.float32)

    def rounded(self, x):
        return x.astype(np.float32).astype(self.dtype)

    def added(self, x, y):
        return self.rounded(x.astype(np.float32) + y.astype(np.float32))

    def norm(self, x, name):
        return self.rounded(rms_norm(x, self.tensors[f"{name}.weight"]))

    def attention(self, qkv, heads):
        batch, length, width = qkv.shape
        qkv = qkv.reshape(batch, length, 3, heads, width // 3 // heads)
        query, key, value = np.moveaxis(qkv.astype(np.float64), 2, 0)
        scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
        shares = self.rounded(causal_softmax(scores.astype(np.float32)))
        mixed = np.einsum("bhqk,bkhd->bqhd", shares.astype(np.float64), value)
        return self.rounded(mixed).reshape(batch, length, width // 3)

    def linear(self, x, name):
        """x `[..., k]` times the weight `[n, k]` called `name`."""
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
        weight = self.tensors[f"{name}.weight"]
        if weight.dtype == np.uint8:
            y = self.fp8_product(rows, numpy_reader.E4M3[weight], name)
        else:
            y = rows.astype(np.float64) @ self.rounded(weight).astype(np.float64).T
        y *= 1 + self.noise * self.random.standard_normal(y.shape)
        return self.rounded(y).reshape(*x.shape[:-1], -1)

    def fp8_product(self, rows, weight, name):
        """Sum over groups of k: the exact product of codes, times both scales."""
        size, scales = self.weight_scales(name, *weight.shape)
        factors, x_scales = self.input_scales(rows, size, name)
        y = np.zeros((len(rows), len(weight)))
        for i, start in enumerate(range(0, rows.shape[1], size)):
            group = slice(start, start + size)
            column = slice(i, i + 1)
            if self.divides:
                scaled = rows[:, group] / x_scales[:, column]
            else:
                scaled = rows[:, group] * factors[:, column]
            codes = self.quantized(scaled)
            y += (codes @ weight[:, group].T) * x_scales[:, column] * scales[:, i]
        return y

    def quantized(self, scaled):
        """The values of the nearest codes, in float64."""
        largest = float(ml_dtypes.finfo(self.activation_dtype).max)
        codes = np.clip(scaled, -largest, largest)
        return codes.astype(self.activation_dtype).astype(np.float64)

    def weight_scales(self, name, n, k):
        """The size of a group of k, and the scales `[n, groups]` of a weight."""
        if self.config["quant_method"] == "fp8":
            blocks = self.tensors[f"{name}.weight_scale_inv"]
            rows, columns = self.config["weight_block_size"]
            return columns, np.repeat(blocks, rows, axis=0)[:n]
        scales = self.tensors[f"{name}.weight_scale"]
        how = self.config["config_groups"]["group_0"]["weights"]
        if how["strategy"] == "group":
            return how["group_size"], 2.0 ** (scales.astype(np.float64) - 127)
        return k, np.broadcast_to(scales.reshape(-1, 1), (n, 1))

    def input_scales(self, rows, size, name):
        """What multiplies activations, and its inverse: both f32 `[rows, groups]`."""
        if self.config["quant_method"] == "fp8":
            return scales_of(amax(rows, size))
        how = self.config["config_groups"]["group_0"]["input_activations"]
        if not how["dynamic"]:
            scale = np.broadcast_to(self.tensors[f"{name}.input_scale"], (len(rows), 1))
            return 1 / scale, scale
        if how["strategy"] == "tensor":
            largest = np.broadcast_to(np.abs(rows).max(), (len(rows), 1))
            return scales_of(largest)
        largest = amax(rows, size)
        if how["strategy"] == "token":
            return scales_of(largest)
        # the smallest power of two with which nothing saturates
        mantissa, exponent = np.frexp(largest / np.float32(LARGEST))
        exponent = exponent - (mantissa == 0.5)
        return np.ldexp(np.float32(1), -exponent), np.ldexp(np.float32(1), exponent)


def scales_of(largest):
    """`448 / amax` and `amax / 448`, in float32."""
    return np.float32(LARGEST) / largest, largest / np.float32(LARGEST)


def amax(rows, size):
    """The largest magnitude of each group of `size` columns: `[rows, groups]`."""
    starts = np.arange(0, rows.shape[1], size)
    return np.maximum.reduceat(np.abs(rows), starts, axis=1)
