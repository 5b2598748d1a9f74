"""Keys that neither the synchronisation method nor the inner optimiser looks at: changed, they change nothing."""

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.method import OUTER_KEYS
from fabrics.training.method_config import method_settings
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from utils.config.schema import Config

_DEFAULTS = Config()


def idle_keys(config: Config) -> list[str]:
    """What to warn of: a line for each key without effect whose value is not the default.

    Comparisons give many methods the same keys, so that it is no error.
    """
    method, kind = METHODS[config.distributed_algo], inner_optimizer_name(config)
    with_method = f"has no effect with distributed_algo {config.distributed_algo}"
    reasons = dict.fromkeys(set(OUTER_KEYS) - set(method.configured(method_settings(config)).outer_keys), with_method)
    for key, kinds in _readers().items():
        if kind is None and key != "weight_decay":  # who updates the parameters itself decays them, too
            reasons[key] = with_method
        elif kind is not None and kind not in kinds and INNER_OPTIMIZERS[kind].keys is not None:
            reasons[key] = f"has no effect without inner_optimizer {' or '.join(kinds)}"
    if method.capabilities.exchanges_gradients:  # moments are the trainer's
        reasons.setdefault("joining_moments", with_method)
    changed = (key for key in reasons if getattr(config, key) != getattr(_DEFAULTS, key))
    return [f"{key}: {reasons[key]}" for key in sorted(changed)]


def _readers() -> dict[str, list[str]]:
    """Of each key that only some inner optimisers look at, which they are."""
    found: dict[str, list[str]] = {}
    for kind, optimizer in INNER_OPTIMIZERS.items():
        for key in optimizer.keys or ():
            found.setdefault(key, []).append(kind)
    return found
