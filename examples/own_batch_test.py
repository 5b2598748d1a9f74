"""A batch test of your own: gradient diversity (arXiv 1706.05699, theorem 2).

The ratio B = E ||g_i||^2 / ||G||^2 = 1 + V / ||G||^2 is the largest batch whose examples are worth as many steps; the
notation is that of algorithms/batch/gradient_statistics.py.

    python run.py plugins=[examples/own_batch_test.py] sampling_method=gradient_diversity

Or in a configuration:

    plugins: [examples/own_batch_test.py]
    sampling_method: gradient_diversity
"""

import math

from algorithms.batch.calc_batch import BATCH_TESTS, BatchTestParameters, lower_ratio
from algorithms.batch.gradient_statistics import GradientStatistics


def gradient_diversity(statistics: GradientStatistics, parameters: BatchTestParameters, batch: int) -> int | None:
    """Return the batch to request; None: the statistics decide nothing."""
    s, confidence = statistics, parameters.confidence
    ratio = lower_ratio(s.variance, s.variance_error, s.squared_norm, s.squared_norm_error, confidence)
    return math.ceil(1.0 + ratio) if s.decisive and math.isfinite(ratio) else None


BATCH_TESTS["gradient_diversity"] = gradient_diversity
