"""Keys without effect: a changed key that no choice of the run reads gets a warning.

Methods declare `outer_keys` and inner optimizers `keys`; READS declares the rest. A value that is not declared, such as
a plugin's, may read every key of its choice. It is not an error, as comparisons give many methods the same keys.
"""

from collections.abc import Iterator
from typing import Any

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.method import OUTER_KEYS
from fabrics.models.model_family import is_pretrained
from fabrics.training.method_config import method_settings
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from utils.config.schema import Config

_DEFAULTS = Config()
_TEXT = ("val_size", "val_sequences", "packing")
_C4 = ("c4_tokenized_path", "c4_local_path", "c4_language", "c4_streaming")
_LINK = ("link_bits_per_second", "link_latency_seconds")

# Choice -> value -> the keys that are read with this value. "given" stands for everything but null and words.
READS: dict[str, dict[Any, tuple[str, ...]]] = {
    "dataset": {
        "python_docs": _TEXT,
        "c4": (*_TEXT, *_C4),
        "text": (*_TEXT, "text_files", "text_documents"),
        "imdb": ("samples_per_class", "imdb_local_path"),
    },
    "data_split": {
        "iid": (),
        "clusters": ("data_shares",),
        "sources": ("data_shares",),
        "dirichlet": ("data_shares", "dirichlet_alpha"),
    },
    "data_split_over": {"trainers": (), "workers": ("data_shares",)},
    "need_to_reinit_output_layers": {False: (), True: ("single_seed",)},
    "clearml": {"off": (), "auto": ("project_name", "task_name")},
    "time_budget": {None: (), "given": _LINK},
    "node_speeds": {None: (), "given": _LINK},
}


def _choices(config: Config) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield each choice of the run in words, the keys that some value of it reads, and those that this value reads."""
    for key, declared in READS.items():
        value = getattr(config, key)
        word = value if value is None or isinstance(value, str | bool) else "given"
        readable = {name for names in declared.values() for name in names}
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        yield f"{key} {shown}", readable, set(declared.get(word, readable))
    trains_tokenizer = config.tokenizer is None and not is_pretrained(config.model_config)
    yield "a tokenizer that is not trained here", {"vocab_size"}, {"vocab_size"} if trains_tokenizer else set()
    method = METHODS[config.distributed_algo]
    named = f"distributed_algo {config.distributed_algo}"
    yield named, set(OUTER_KEYS), set(method.configured(method_settings(config)).outer_keys)
    kind = inner_optimizer_name(config)
    readable = set().union(*(each.keys or () for each in INNER_OPTIMIZERS.values()))
    if kind is None:  # the method updates the parameters itself
        read = {"weight_decay"}
    elif INNER_OPTIMIZERS[kind].keys is None:
        read = set(readable)
    else:
        read = set(INNER_OPTIMIZERS[kind].keys)
    own = kind is not None and not method.capabilities.exchanges_gradients
    yield f"inner_optimizer {kind}" if own else named, readable, read


def idle_keys(config: Config) -> list[str]:
    """Return one warning for each changed key that nothing in the run reads."""
    reasons: dict[str, list[str]] = {}
    read_by_run = set()
    for choice, readable, read in _choices(config):
        read_by_run |= read
        for key in readable - read:
            reasons.setdefault(key, []).append(choice)
    return [
        f"{key}: has no effect with {' and '.join(reasons[key])}"
        for key in sorted(reasons.keys() - read_by_run)
        if getattr(config, key) != getattr(_DEFAULTS, key)
    ]
