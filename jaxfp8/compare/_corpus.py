"""A real text that needs no download: Python's own reference manual, as `pydoc` ships it."""

from pydoc_data.topics import topics

import numpy as np

VALIDATION_FRACTION = 0.1


class Corpus:
    """Characters as integers, the first 90 % to train on and the last 10 % to validate on.

    The manual follows the Python version (465k characters in 3.11, 511k in 3.13), so losses compare within one version.

    Args:
        text: another text than the manual.
    """

    def __init__(self, text: str | None = None):
        text = "".join(topics[name] for name in sorted(topics)) if text is None else text
        self.vocabulary = sorted(set(text))
        code = {character: i for i, character in enumerate(self.vocabulary)}
        self.codes = np.array([code[character] for character in text], np.int32)
        cut = round(len(self.codes) * (1 - VALIDATION_FRACTION))
        self.train, self.validation = self.codes[:cut], self.codes[cut:]

    def random_batches(self, seed, steps, batch, length):
        """Yield `steps` arrays `(batch, length + 1)`: inputs and, shifted by one, targets. The seed fixes them all."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            starts = rng.integers(0, len(self.train) - length, batch)
            yield self.train[starts[:, None] + np.arange(length + 1)]

    def validation_batches(self, batch, length, limit=None):
        """Return the validation text in order, `(batches, batch, length + 1)`, without a last incomplete batch."""
        windows = np.lib.stride_tricks.sliding_window_view(self.validation, length + 1)[::length]
        count = len(windows) // batch
        return windows[: count * batch].reshape(count, batch, length + 1)[:limit]
