"""A real text that needs no download: Python's own reference manual, as `pydoc` ships
it.
"""

from pydoc_data.topics import topics

import numpy as np

VALIDATION_FRACTION = 0.1


class Corpus:
    """Characters as int32 codes, the first 90 % to train on and the last 10 % to
    validate on.

    The manual differs between Python versions (465k characters in 3.11, 511k in 3.13),
    so only losses of one version can be compared.

    Args:
        text: the text; None is the manual.
    """

    def __init__(self, text: str | None = None):
        text = (
            "".join(topics[name] for name in sorted(topics)) if text is None else text
        )
        self.vocabulary = sorted(set(text))
        code = {character: i for i, character in enumerate(self.vocabulary)}
        self.codes = np.array([code[character] for character in text], np.int32)
        cut = round(len(self.codes) * (1 - VALIDATION_FRACTION))
        self.train, self.validation = self.codes[:cut], self.codes[cut:]

    def random_batches(self, seed, steps, batch, length):
        """Yield `steps` int32 arrays `(batch, length + 1)`, which hold inputs and,
        shifted by one, targets.

        Equal seeds give equal arrays.
        """
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            starts = rng.integers(0, len(self.train) - length, batch)
            yield self.train[starts[:, None] + np.arange(length + 1)]

    def validation_batches(self, batch, length, limit=None):
        """Return the validation text in order, int32 `(batches, batch, length + 1)`,
        without a last incomplete batch.

        Args:
            batch: the number of windows in a batch.
            length: the number of characters in a window, without the last target.
            limit: the largest number of batches to return; None returns all.
        """
        windows = np.lib.stride_tricks.sliding_window_view(self.validation, length + 1)[
            ::length
        ]
        count = len(windows) // batch
        return windows[: count * batch].reshape(count, batch, length + 1)[:limit]
