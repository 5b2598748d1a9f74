"""All configuration keys, by section: name, type, default, meaning, and the checks of each section.

`Config` inherits from every section, so that all keys are attributes of one flat object: `config.ETA`. A section's
`check` is called on the whole `Config` and may use the keys of other sections. Checks that need the registries (names
of datasets, abilities of a method) are in fabrics/config_checks.py. utils/config/reading.py reads files.

pydantic converts and checks the type of each value; docs/configuration.md is generated from this file.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from algorithms.nodes.traffic import Link
from algorithms.schedule.schedules import NAMED_SCHEDULES, token_thresholds


class ConfigError(ValueError):
    """One or more problems in a configuration; `problems` holds one line for each."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


# Types


def _device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ValueError("must be cpu, cuda, or one GPU such as cuda:0")
    return value


def _not_a_bool(value):
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


def _auto_or_a_count(value):
    if isinstance(value, bool) or not (value == "auto" or (str(value).isdecimal() and int(value) > 0)):
        raise ValueError("Input should be auto or a positive integer")
    return value


def _compile_mode(value):
    if not isinstance(value, bool) and value not in ("auto", "reduce-overhead"):
        raise ValueError("Input should be true, false, auto or reduce-overhead")
    return value


def _link(value: str) -> str:
    Link.parse(value)
    return value


def _on_and_off_are_words(value):
    return ("on" if value else "off") if isinstance(value, bool) else value  # YAML reads them as true and false


def _no_null_character(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a null character")
    return value


def plain(value):
    """Return a value of a script in the types of YAML, so that a written configuration reads back equal."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value  # a number of NumPy


Number = BeforeValidator(_not_a_bool)
# Larger numbers would not fit into tensors and floats.
PositiveInt = Annotated[int, Field(gt=0, lt=2**63), Number]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63), Number]
AtLeastTwo = Annotated[int, Field(ge=2, lt=2**63), Number]
Vocabulary = Annotated[int, Field(ge=258, lt=2**31), Number]
Threads = Annotated[int, Field(gt=0, lt=2**15), Number]
# The data order of merged trainers is nested, one level for each merge into the same trainer.
TrainerCount = Annotated[int, Field(gt=0, le=128), Number]
NodeCount = Annotated[int, Field(gt=0, le=10_000), Number]
Seed = Annotated[int, Field(ge=0, lt=2**64), Number]  # the range of PyTorch's generators
PositiveFloat = Annotated[float, Field(gt=0, le=1e38, allow_inf_nan=False), Number]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e38, allow_inf_nan=False), Number]
Fraction = Annotated[float, Field(gt=0, le=1), Number]
FractionOrZero = Annotated[float, Field(ge=0, le=1), Number]
BelowOne = Annotated[float, Field(ge=0, lt=1), Number]
AtLeastOne = Annotated[float, Field(ge=1), Number]
Pair = Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]
Device = Annotated[str, AfterValidator(_device)]
Name = Annotated[str, Field(min_length=1), AfterValidator(_no_null_character)]
# Made absolute, so that the configuration in a run folder means the same in every working directory.
File = Annotated[Name, AfterValidator(os.path.abspath)]

Settings = Annotated[dict[str, Any], AfterValidator(plain)]


def key(default, meaning: str, *, changes_training: bool = True):
    """Declare a configuration key.

    Args:
        meaning: one sentence for docs/configuration.md; `null` is Python's None.
        changes_training: whether a run that is resumed with another value trains differently.
    """
    metadata = {"meaning": meaning, "changes_training": changes_training}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def free_key(default, meaning: str):
    """Declare a key that may have another value in a resumed run, which trains alike."""
    return key(default, meaning, changes_training=False)


def _is_schedule(pairs: Sequence[Sequence[float]]) -> bool:
    """Return whether these are pairs of a growing share of the run, 0 to below 1, and a positive integer."""
    shares = [share for share, _ in pairs]
    grows = all(before < after for before, after in itertools.pairwise(shares))
    return grows and shares[-1] < 1.0 and all(number >= 1 and number.is_integer() for _, number in pairs)


class Section:
    """Some keys of the configuration."""

    def check(self) -> list[str]:
        """Return one line for each problem with these keys. `self` is the whole Config; all types are right."""
        return []


# The budget keys, of which a run has at most one, and their units.
BUDGETS = {"communication_budget": "communications", "byte_budget": "bytes", "time_budget": "seconds"}
CLEARML_MODES = ("auto", "online", "offline", "off")


@dataclass(frozen=True)
class Length(Section):
    """Seed and length of the run"""

    training_seed: Seed = key(42, "Seed of the initialisation, the data order and dropout.")
    number_of_outer_steps: PositiveInt | None = free_key(
        None, "Rounds to train; null: no limit. The first limit that is reached ends the run."
    )
    number_of_training_epochs: PositiveFloat | None = free_key(
        None, "Passes over the training sample, all trainers together; null: no limit."
    )
    max_tokens: PositiveInt | None = free_key(None, "Training tokens, all trainers together; null: no limit.")

    def check(self) -> list[str]:
        if self.number_of_outer_steps or self.number_of_training_epochs or self.max_tokens:
            return []
        if self.simulates_time_budget:
            return []
        return ["number_of_outer_steps: give it, number_of_training_epochs or max_tokens, so that the run has an end"]


@dataclass(frozen=True)
class Devices(Section):
    """Devices and processes"""

    CUDA_VISIBLE_DEVICES: str | None = free_key(
        None, "GPUs this run may use, like the environment variable; null: all."
    )
    devices: Annotated[list[Device], Field(min_length=1)] | None = key(
        None, "Devices to train on, numbered among the visible ones; null: every visible GPU, else the CPU."
    )
    processes: Annotated[Literal["auto"] | PositiveInt, BeforeValidator(_auto_or_a_count)] = free_key(
        "auto",
        "Processes that `python run.py` starts; auto: one for each GPU, or one per CPU core, at most one per node.",
    )
    cpu_threads: Threads | None = key(
        None,
        "PyTorch CPU threads in each process; null: the cores divided among the nodes, whatever OMP_NUM_THREADS says, "
        "as the bits depend on it.",
    )
    collective_timeout_minutes: Annotated[float, Field(gt=0, le=1e6), Number] = free_key(
        30.0,
        "Longest wait for another process within a round, which then ends the run; evaluation and checkpoints may take "
        "longer.",
    )
    deterministic: bool | None = key(
        None, "Sum in worker order, so that bits do not depend on the number of processes; null: true on CPUs only."
    )


@dataclass(frozen=True)
class Computation(Section):
    """Precision and memory"""

    autocast: Literal["bfloat16"] | None = key(
        None,
        "bfloat16: models compute in it (torch.autocast); parameters, moments and sums stay float32; null: float32.",
    )
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = key(
        None,
        "Precision of float32 matrix products in PyTorch: high is TF32 on GPUs, medium bfloat16; null: high on GPUs, "
        "highest on CPUs.",
    )
    compile_model: Annotated[bool | Literal["reduce-overhead", "auto"], BeforeValidator(_compile_mode)] = key(
        False,
        "Compile the model (torch.compile); reduce-overhead: also replay CUDA graphs, for small models on GPUs; auto: "
        "false on CPUs, on GPUs reduce-overhead for up to 10M parameters and true for more.",
    )
    memory: Literal["auto"] | None = free_key(
        None,
        "auto: choose the fastest combination of activation_checkpointing, loss_chunk_tokens, offload_outer_state and "
        "offload_moments that fits, as --plan estimates. Keys that are not null stay as they are. null: as set.",
    )
    activation_checkpointing: bool | None = free_key(
        None,
        "Recompute layers in the backward pass: less memory, a third more time; only for models of transformers; null: "
        "false, or as memory: auto chooses.",
    )
    loss_chunk_tokens: PositiveInt | Literal[False] | None = key(
        None,
        "Tokens of each sequence whose logits exist at a time: less memory, one more pass through the output layer. "
        "false: all. null: all, or as memory: auto chooses.",
    )
    offload_outer_state: bool | None = free_key(
        None,
        "Keep trainers' parameters and outer momentum in host memory, where the outer step then runs; null: false, or "
        "as memory: auto chooses.",
    )
    offload_moments: bool | None = free_key(
        None,
        "Keep the inner optimizers' state in host memory, except that of the worker that trains; null: false, or as "
        "memory: auto chooses.",
    )
    switch_mode: str = key("threshold_switch_mode", "Rule by which a step accumulates gradients over micro-batches.")
    switch_multiplier: PositiveInt = key(
        2, "threshold_switch_mode accumulates if a worker's batch exceeds this multiple of the max batch."
    )
    max_batch_size: PositiveInt | None = key(
        None, "Largest micro-batch, in examples; null: measured from the device's memory."
    )
    padding_percentage: Fraction = key(0.9, "Share of a device's memory that a run may use.")


@dataclass(frozen=True)
class Data(Section):
    """Data"""

    dataset: Name = key("python_docs", "Training data.")
    data_sample_size: PositiveInt | None = key(
        None, "Documents to train on; null: all. C4 from the hub needs a number."
    )
    val_size: PositiveInt | None = key(
        None,
        "Documents held out for validation; null: one in twenty, at most 500. Of a dataset's own validation part null "
        "reads 500 unless data_sample_size is set, and of c4_tokenized_path all.",
    )
    samples_per_class: PositiveInt | None = key(
        None,
        "Evaluation reviews per class; null: the size of the smaller class of the test part.",
    )
    sequence_length: AtLeastTwo = key(
        128,
        "Tokens per sequence: documents are joined, separated by end-of-text, and cut; reviews and conversations are "
        "cut to this length.",
    )
    tokenizer: Name | None = key(
        None,
        "Hub name or folder of a tokenizer; null: that of the pretrained model or of c4_tokenized_path, else one "
        "trained on the training documents.",
    )
    vocab_size: Vocabulary = key(2048, "Vocabulary of a tokenizer trained here: byte-level BPE, or WordPiece for bert.")
    cache_dir: Name = free_key(".cache", "Folder for tokenised documents, shared by runs.")
    text_files: Annotated[list[Name], Field(min_length=1)] | None = key(
        None, "Files, folders (with subfolders) or globs, plain or gzip, with UTF-8 text or JSON lines of messages."
    )
    text_documents: str = key("files", "Extent of a document: a whole file, or a block between blank lines.")
    c4_tokenized_path: Name | None = key(None, "Folder written by c4/tokenize_c4.py.")
    c4_local_path: Name | None = key(
        None, "File, folder or glob of C4 shards (JSON lines, plain or gzip), without c4_tokenized_path."
    )
    c4_language: Name = key(
        "en", "Configuration of allenai/c4 on the hub, or subfolder of c4_local_path, if it has one of that name."
    )
    imdb_local_path: Name | None = key(None, "The folder that aclImdb_v1.tar.gz unpacks to; null: the hub.")

    def check(self) -> list[str]:
        if self.dataset in ("text", "messages") and not self.text_files:
            return [f"text_files: dataset {self.dataset} needs the names of its files"]
        if self.c4_tokenized_path and self.c4_local_path:
            return [f"c4_local_path: must be null with c4_tokenized_path, got {self.c4_local_path}"]
        return []


@dataclass(frozen=True)
class DataSplit(Section):
    """Division of the data"""

    data_split: str = key("iid", "Division of the documents: at random, by k-means over TF-IDF, or by origin.")
    data_split_over: Literal["trainers", "workers"] = key(
        "trainers", "Owner of one part of the data: a trainer or a worker."
    )
    data_shares: PositiveInt | None = key(
        None, "Shares of data_split; null: one per trainer, or one per node with data_split_over workers."
    )

    @property
    def splits_data(self) -> bool:
        """Return whether documents are divided into shares, instead of drawn at random by each trainer."""
        return self.data_split != "iid" or self.data_split_over == "workers"


@dataclass(frozen=True)
class Model(Section):
    """Model"""

    model_type: Name = key("microllama", "Family of the model.")
    model_config: Settings = key(
        {"preset": "demo"},
        "preset or name (a preset, a hub model or a folder), pretrained, and architecture values to change.",
    )
    lora: Settings = key(
        {},
        "Train low-rank adapters only: rank (8), alpha (16) and targets, the linear layers by the end of their names.",
    )
    identical_initialisation: bool = key(True, "Start all trainers from the same weights.")
    need_to_reinit_output_layers: bool = key(False, "Reinitialise the output layer (Xavier uniform) before training.")
    single_seed: bool = key(False, "With need_to_reinit_output_layers: the same output layer for all trainers.")


@dataclass(frozen=True)
class Trainers(Section):
    """Trainers and merging"""

    number_of_initial_trainers: TrainerCount = key(4, "Trainers (model instances) at the start, at most 128.")
    merging_policy: str = key(
        "worst_with_worst",
        "Trainers that merge: those with the smallest requests, or the largest with the smallest ones.",
    )
    merge_frequency: PositiveInt = key(2, "Rounds between merges, while more than one trainer is left.")
    merge_count: AtLeastTwo = key(2, "Trainers that become one in a merge.")


@dataclass(frozen=True)
class Nodes(Section):
    """Nodes"""

    nodes_per_gpu: NodeCount = key(4, "Nodes (worker slots) per device, also on the CPU, at most 10,000.")
    devices_per_node: PositiveInt = free_key(
        1,
        "Devices of a node; with several, they share one model (FSDP2), and nodes_per_gpu counts nodes per such group.",
    )
    node_schedule: Annotated[list[Pair], Field(min_length=1)] | None = key(
        None, "Pairs of a share of the run (first 0) and the number of nodes working from there on; null: always all."
    )
    participants: Fraction = key(
        1.0, "Share of a trainer's workers that take part in a round, at least one, drawn anew each round; others rest."
    )
    message_loss: BelowOne = key(
        0.0, "Probability that a worker's message is lost; the worker then continues from its own parameters."
    )
    node_speeds: Annotated[list[PositiveFloat], Field(min_length=1)] | None = key(
        None, "Examples per second of every node, to simulate unequal nodes on a virtual clock; null: measured speeds."
    )
    balance: Literal["equal", "batch", "steps"] = key(
        "equal",
        "Work of nodes of unequal speed: equal shares of the batch, shares in proportion to speed, or fewer inner "
        "steps on slower nodes.",
    )
    smallest_worker_batch: PositiveInt | None = key(
        None,
        "Fewest examples of a worker in an inner step; a trainer with a smaller request uses fewer nodes; null: always "
        "all nodes.",
    )
    link: Annotated[str, AfterValidator(_link)] | None = key(
        None,
        "Simulated link of every node, as rate and latency, for time_budget and node_speeds: `1Gb/s,20ms`; null: "
        "sending takes no time.",
    )

    @property
    def simulated_link(self) -> Link:
        return Link.parse(self.link) if self.link else Link()

    def check(self) -> list[str]:
        found = []
        smallest = self.smallest_worker_batch
        fewest = 3 if self.sampling_method.endswith("inner_product_test") else 2
        if smallest and self.compares_workers and self.INITIAL_BATCH_SIZE < fewest * smallest:
            found.append(
                f"smallest_worker_batch: across_workers needs {fewest} workers from the first round on, and so an "
                f"INITIAL_BATCH_SIZE of {fewest * smallest} at least, got {self.INITIAL_BATCH_SIZE}"
            )
        if self.balance == "batch" and smallest is not None:
            found.append(f"smallest_worker_batch: must be null with balance batch, got {smallest}")
        schedule = self.node_schedule
        if schedule is not None and not (_is_schedule(schedule) and schedule[0][0] == 0.0):
            found.append(
                f"node_schedule: must be pairs of a share of the run, growing from 0 itself to below 1, and a "
                f"positive integer, got {schedule}"
            )
        if self.node_speeds is None and self.balance != "equal":
            if self.deterministic:
                found.append(
                    f"deterministic: a run with balance {self.balance} and without node_speeds follows the clock and "
                    f"never has the same bits"
                )
            if self.number_of_inner_steps_between_outers < 2:
                found.append(
                    "number_of_inner_steps_between_outers: must be at least 2 to measure speeds, as the first inner "
                    "step does not count; or give node_speeds"
                )
        return found


@dataclass(frozen=True)
class Inner(Section):
    """Inner steps"""

    number_of_inner_steps_between_outers: PositiveInt = key(20, "Inner steps H of every worker in a round.")
    inner_optimizer: str | None = key(
        None, "Optimizer of the inner steps; muon: Muon for matrices, AdamW for the rest; null: the method's own."
    )
    learning_rate_for_inner_opt: PositiveFloat = key(1e-3, "Base learning rate of the inner optimizer.")
    lr_sgd: PositiveFloat | None = key(None, "Base learning rate of inner SGD; null: learning_rate_for_inner_opt.")
    weight_decay: NonNegativeFloat = key(
        0.1,
        "Weight decay of AdamW, Muon, and a method without an inner optimizer; independent of the gradient, on every "
        "parameter.",
    )
    inner_optimizer_config: Settings = key(
        {}, "Parameters of inner_optimizer; adamw and muon have {betas: [0.9, 0.99]}, the betas of AdamW."
    )
    gradient_clipping: PositiveFloat | None = key(1.0, "Largest norm of an inner step's gradient; null: no clipping.")
    warmup_steps: NonNegativeInt = key(0, "Inner steps over which the learning rate grows linearly.")
    warmup_tokens: NonNegativeInt = key(
        0, "Tokens of a trainer over which the learning rate grows linearly; the slower of the two warm-ups counts."
    )
    learning_rate_schedule: str = key("constant", "Inner learning rate over the run.")
    minimum_learning_rate_ratio: FractionOrZero = key(
        0.1, "Share of the base learning rate that a schedule leaves at the end."
    )


@dataclass(frozen=True)
class Outer(Section):
    """Synchronisation"""

    distributed_algo: str = key("DiLoCo", "Synchronisation method of the workers of a trainer.")
    synchronisation: Settings = key({}, "Parameters of distributed_algo; docs/methods.md lists them.")
    learning_rate_for_outer_opt: PositiveFloat = key(0.7, "Learning rate of the outer step.")
    outer_momentum: BelowOne = key(0.9, "Momentum of the outer step.")
    communication_dtype: str = key(
        "float32",
        "Encoding of pseudo-gradients: unchanged, rounded, or integers of 8 or 4 bits with a scale per block.",
    )


@dataclass(frozen=True)
class Batch(Section):
    """Adaptive batch size"""

    INITIAL_BATCH_SIZE: PositiveInt = key(
        8, "Requested batch of every trainer in the first round, in examples over all its workers."
    )
    sampling_method: str = key("norm_test", "Batch test that sets the requested batch.")
    ETA: PositiveFloat = key(0.8, "eta of the norm test.")
    ETA_at_end: PositiveFloat | None = key(
        None, "eta of the norm test at the end of the run, reached linearly from ETA; null: ETA throughout."
    )
    vartheta: PositiveFloat = key(0.9, "theta of the inner product test.")
    nu: PositiveFloat = key(5.84, "nu of the augmented inner product test.")
    debias: bool = key(
        False,
        "Divide by an unbiased estimate of the squared gradient norm instead of the batch gradient's squared norm.",
    )
    statistics_estimator: str = key(
        "per_example", "Gradients that the batch test compares: of examples, of whole workers, or of a node's devices."
    )
    statistics_batch_size: AtLeastTwo = key(
        8, "Smallest sample of per_example; workers with fewer examples in a step also use a probe batch of this size."
    )
    batch_test_start: PositiveInt = key(1, "First round with a batch test.")
    batch_test_confidence: NonNegativeFloat = key(
        0.0, "Standard errors by which a batch test's answer is lowered; 0: the estimate itself, as in the papers."
    )
    statistics_smoothing: BelowOne = key(
        0.0, "Weight of the past in a moving average of the statistics over rounds; 0: those of this round alone."
    )
    max_batch_growth: AtLeastOne | None = key(
        None, "Largest factor by which a request grows in a round; null: no bound."
    )
    max_requested_batch: PositiveInt | None = key(None, "Largest request; null: the size of the trainer's data subset.")
    batch_schedule: Annotated[list[Pair], Field(min_length=1)] | Name | None = key(
        None,
        "Requested batch over the run, with sampling_method none: pairs of share and request, thresholds in tokens "
        '("0:16 500k:32 1M:64"), seesaw or critical_batch; null: constant.',
    )

    @property
    def compares_workers(self) -> bool:
        """True if the statistics compare gradients of whole workers, which the workers send each other."""
        return self.statistics_estimator == "across_workers" and self.sampling_method != "none"

    @property
    def compares_devices(self) -> bool:
        """True if the statistics compare gradients of the devices of a node."""
        return self.statistics_estimator == "across_devices"

    def check(self) -> list[str]:
        found = []
        initial = self.INITIAL_BATCH_SIZE
        if self.max_requested_batch is not None and self.max_requested_batch < initial:
            found.append(
                f"max_requested_batch: must be at least INITIAL_BATCH_SIZE ({initial}), got {self.max_requested_batch}"
            )
        if self.batch_schedule is None:
            return found
        if self.sampling_method != "none":
            found.append(f"batch_schedule: needs sampling_method none, got {self.sampling_method}")
        if self.batch_schedule == "seesaw" and self.learning_rate_schedule == "constant":
            found.append("batch_schedule: seesaw needs a learning_rate_schedule that falls, got constant")
        elif self.batch_schedule == "seesaw" and self.minimum_learning_rate_ratio >= 0.5:
            found.append(
                f"minimum_learning_rate_ratio: must be below 0.5 with batch_schedule seesaw, which doubles the batch "
                f"where the learning rate has halved, got {self.minimum_learning_rate_ratio}"
            )
        if self.batch_schedule in NAMED_SCHEDULES:
            return found
        pairs = self.batch_schedule
        if isinstance(pairs, str):
            others = (self.number_of_outer_steps, self.number_of_training_epochs, self.simulates_time_budget)
            if self.max_tokens is None or any(others):
                found.append("batch_schedule: thresholds in tokens need max_tokens as the only limit of the run")
                return found
            try:
                pairs = token_thresholds(pairs, self.max_tokens)
            except ValueError as error:
                names = ", ".join(NAMED_SCHEDULES)
                found.append(f"batch_schedule: must be pairs, thresholds in tokens, or one of {names}; {error}")
                return found
        if not _is_schedule(pairs):
            found.append(
                f"batch_schedule: must be pairs of a share of the run, growing from 0 to below 1 (thresholds: below "
                f"max_tokens), and a positive integer, got {self.batch_schedule}"
            )
        elif pairs[0][0] == 0 and pairs[0][1] != initial:
            found.append(f"batch_schedule: must begin with INITIAL_BATCH_SIZE ({initial}), got {pairs[0][1]:g}")
        return found


@dataclass(frozen=True)
class Budget(Section):
    """Budgets"""

    communication_budget: PositiveInt | None = key(
        None, "Communications in which to spend max_tokens or the epochs; null: no such budget."
    )
    byte_budget: PositiveInt | None = key(
        None, "Bytes of communication, merges and redistribution included; null: no such budget."
    )
    time_budget: PositiveFloat | None = key(
        None,
        "Seconds of measured training and simulated communication; with node_speeds, seconds of the virtual clock, at "
        "which the run ends; null: no such budget.",
    )

    objective: Literal["examples", "time"] = key(
        "examples",
        "Resource that the run is planned for. time: the run chooses workers, batch, inner steps and method for a "
        "`time_budget` with `node_speeds`.",
    )

    @property
    def budget(self) -> str | None:
        """The budget key that is set; None without a budget."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), None)

    @property
    def simulates_time_budget(self) -> bool:
        """True if the time budget counts on the virtual clock: a limit, which sets no length of rounds."""
        return self.time_budget is not None and self.node_speeds is not None

    def check(self) -> list[str]:
        found = []
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            found.append(f"{', '.join(given)}: a run has one budget; give one of them")
        if self.simulates_time_budget:
            return found
        for name in given:
            if self.max_tokens is None and self.number_of_training_epochs is None:
                found.append(f"{name}: needs max_tokens or number_of_training_epochs, which it is spent on")
            if self.number_of_outer_steps is not None:
                found.append(f"number_of_outer_steps: must be null with a {name}, which sets the number of rounds")
            for key_name, neutral in (("node_schedule", None), ("participants", 1.0)):
                if getattr(self, key_name) != neutral:
                    found.append(
                        f"{key_name}: must be {json.dumps(neutral)} with a {name}, which plans with the same workers "
                        f"in every round, got {getattr(self, key_name)}"
                    )
        if self.time_budget is not None:
            if self.link is None:
                found.append("time_budget: needs a link, over which communications take time")
            if self.deterministic:
                found.append("deterministic: a run with a time_budget follows the clock and never has the same bits")
        return found


@dataclass(frozen=True)
class Checkpoint(Section):
    """Checkpoints"""

    save_weights_every: PositiveInt | None = free_key(
        None, "Write a checkpoint and the models every n rounds; null: models only at the end."
    )
    checkpoint_every_minutes: PositiveFloat | None = free_key(
        10.0, "Write a checkpoint when the last one is older than this; null: off."
    )


@dataclass(frozen=True)
class Log(Section):
    """Logs and evaluation"""

    log_dir: Name = free_key("logs", "Folder in which the run folder is created.")
    run_name: Name | None = free_key(
        None, "Name of the run folder, for `--resume auto`; null: model, dataset and date."
    )
    plot_at_end: bool = free_key(
        True,
        "Draw plots and report at the end; `python -m training_logs.training_monitoring RUN_DIR` draws them later.",
    )
    trackers: list[Literal["clearml", "tensorboard", "wandb"]] = free_key(
        ["clearml"], "Experiment trackers that receive the run; all but clearml need their packages."
    )
    clearml: Annotated[str, BeforeValidator(_on_and_off_are_words)] = free_key(
        "auto", "Mode of the tracker clearml; auto: online with credentials, else an offline session in the run folder."
    )
    project_name: str | None = free_key(None, "Project of the trackers; null: AdLoCo.")
    eval_every: PositiveInt = free_key(1, "Evaluate the trainers every n rounds, and at the end.")
    eval_batch_size: PositiveInt = free_key(16, "Examples per batch in evaluation.")


@dataclass(frozen=True)
class Plugins(Section):
    """Plugins"""

    plugins: list[File] = free_key(
        [],
        "Python files that extend the registries, imported before names and combinations are checked; relative to the "
        "working directory.",
    )


@dataclass(frozen=True)
class Config(
    Length, Data, DataSplit, Model, Trainers, Inner, Outer, Batch, Budget, Nodes, Devices, Computation, Checkpoint, Log,
    Plugins,
):  # fmt: skip
    """Every key of a configuration. Most names are those of the published code's README."""

    def check(self) -> list[str]:
        """Return the problems of all sections, one line each."""
        return [problem for section in SECTIONS for problem in section.check(self)]


SECTIONS = Config.__bases__
FIELDS = {entry.name: entry for section in SECTIONS for entry in dataclasses.fields(section)}
