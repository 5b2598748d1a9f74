"""A batch test of one's own: gradient diversity (arXiv 1706.05699, theorem 2).

The sum of the examples' squared gradient norms over the squared norm of their sum says up to which batch n examples are
worth n steps: B = E ||g_i||^2 / ||G||^2 = 1 + V / ||G||^2, in the notation of algorithms/batch/gradient_statistics.py.

    python run.py plugins=[examples/own_batch_test.py] sampling_method=gradient_diversity

takes as long as the demo. Or in a configuration:

    plugins: [examples/own_batch_test.py]
    sampling_method: gradient_diversity
"""

import math

from algorithms.batch.calc_batch import BATCH_TESTS, BatchTestParameters, lower_ratio
from algorithms.batch.gradient_statistics import GradientStatistics


def gradient_diversity(statistics: GradientStatistics, parameters: BatchTestParameters, batch: int) -> int | None:
    """The batch to request; None: the statistics say nothing. `confidence` lowers it by as many standard errors."""
    s, confidence = statistics, parameters.confidence
    ratio = lower_ratio(s.variance, s.variance_error, s.squared_norm, s.squared_norm_error, confidence)
    return math.ceil(1.0 + ratio) if s.decisive and math.isfinite(ratio) else None


BATCH_TESTS["gradient_diversity"] = gradient_diversity
