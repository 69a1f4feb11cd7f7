"""Losses of MaxText's experts with `sparse_matmul=true` beside `false`, on one device.

MaxText 0.2.5 has to be installed; its own training loop runs, on characters of Python's
manual. All runs of a seed start from the same weights and see the same batches. With
`false` every expert multiplies every token, so none is dropped. A gap is the mean loss
of the last 5 of 20 steps, less that of bf16 with the same seed and `sparse_matmul`; the
difference is the gap with `true` less that with `false`. Intervals are of 95 %, over
seeds. The control has two bits of mantissa: its gap with `true` has to be outside.
"""

import itertools
import json
import pathlib
import sys
import tempfile
from importlib.metadata import version

import numpy as np
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train

import jaxfp8
from jaxfp8.integrations import maxtext

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
from _compare_corpus import Corpus  # noqa: E402
from _compare_runs import interval  # noqa: E402
from _environment import environment, result_parser  # noqa: E402

BASE = pathlib.Path(sys.modules["maxtext"].__file__).parent / "configs/base.yml"
OPTIONS = """run_name=experts hardware=cpu skip_jax_distributed_system=true
    enable_checkpointing=false enable_tensorboard=false enable_goodput_recording=false
    monitor_goodput=false jax_cache_dir= dataset_type=synthetic packing=false
    attention=dot_product sharding_tolerance=1.0 vocab_size=256 max_target_length=64
    per_device_batch_size=8 base_num_decoder_layers=2 base_emb_dim=128 base_mlp_dim=128
    base_moe_mlp_dim=128 base_num_query_heads=4 base_num_kv_heads=4 head_dim=16
    decoder_block=mixtral num_experts=4 num_experts_per_tok=2 capacity_factor=-1
    learning_rate=0.003 steps=20""".split()
# MaxText's `quantization`, and what `install` gets; with None the flag is the recipe.
ARMS = {
    "bf16": ("fp8", jaxfp8.HighPrecision()),
    "current": ("te_fp8_currentscaling", None),
    "delayed": ("te_fp8_delayedscaling", None),
    "control": ("fp8", jaxfp8.Float8CurrentScaling(fp8_format=jaxfp8.Format.E5M2)),
}


class Text(input_pipeline_interface.SyntheticDataIterator):
    def __next__(self):
        if not hasattr(self, "batches"):
            size = self.config.global_batch_size_to_load, self.config.max_target_length
            seed = self.config.data_shuffle_seed
            self.batches = Corpus().random_batches(seed, 99, *size)
        self.data = (next(self.batches), *self.data[1:])
        return super().__next__()


def run(arm: str, sparse: str, seed: int) -> list[float]:
    """Return the loss of each step."""
    flag, recipe = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder, maxtext.install(recipe):
        metrics = pathlib.Path(folder) / "metrics"
        options = f"""quantization={flag} sparse_matmul={sparse} metrics_file={metrics}
            base_output_directory={folder} init_weights_seed={seed}
            data_shuffle_seed={seed}""".split()
        train.train_loop(*train.initialize(["", str(BASE), *OPTIONS, *options]))
        lines = metrics.read_text().splitlines()
    losses = [round(json.loads(line)["learning/loss"], 6) for line in lines]
    print(seed, arm, sparse, losses, file=sys.stderr, flush=True)
    return losses


if __name__ == "__main__":
    path = result_parser(__doc__).parse_args().json
    input_pipeline_interface.SyntheticDataIterator = Text
    modes, losses, gaps = ("true", "false"), {}, {}
    for seed, arm, mode in itertools.product(range(5), ARMS, modes):
        losses.setdefault(f"{arm} {mode}", []).append(run(arm, mode, seed))
    ends = {key: np.array(runs)[:, -5:].mean(axis=1) for key, runs in losses.items()}
    for arm in ARMS:
        true, false = (ends[f"{arm} {mode}"] - ends[f"bf16 {mode}"] for mode in modes)
        rows = {"true": true, "false": false, "difference": true - false}
        gaps[arm] = {name: interval(values) for name, values in rows.items()}
    record = {"environment": environment(maxtext=version("maxtext")), "gaps": gaps}
    text = json.dumps(record | {"losses": losses}, indent=1)
    path.write_text(text + "\n") if path else print(text)
