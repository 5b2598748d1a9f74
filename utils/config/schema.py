"""The keys of the configuration: names, types, ranges, defaults and meanings; `config_reading` reads and checks them.

Those of what is trained, where and on what are in `run_keys`, those of how here.

Types and ranges are pydantic's. A key whose words are those of a registry (datasets, batch tests, ...) is marked with
`choices`; the words come from `fabrics.config_checks`, so that this module depends on nothing that trains.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from utils.config.run_keys import RunKeys
from utils.config.types import (
    AtLeastOne,
    BelowOne,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    key,
)


class ConfigError(ValueError):
    """One or more problems in a configuration; `problems` holds one line for each."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


# The keys of which a run has one at most, and in what each counts.
BUDGETS = {"communication_budget": "communications", "byte_budget": "bytes", "time_budget": "seconds"}
# What `clearml` may be.
CLEARML_MODES = ("auto", "online", "offline", "off")


@dataclass(frozen=True)
class Config(RunKeys):
    """Every key of a configuration; the names are those of the published code's README."""

    # Cluster
    nodes_per_gpu: PositiveInt = key(4, "nodes (worker slots) per device, on the CPU too")
    devices_per_node: PositiveInt = key(
        1,
        "devices that a node is made of, an island on one machine: as many processes share every model, its state and "
        "its micro-batches among them (FSDP2), and nodes_per_gpu counts the nodes of an island",
        changes_training=False,
    )
    smallest_worker_batch: PositiveInt | None = key(
        None,
        "examples that every worker of a trainer has at least in an inner step: with a smaller request a trainer works "
        "with fewer of its nodes, and with one it communicates nothing; null: always with all",
    )
    number_of_initial_trainers: PositiveInt = key(4, "trainers (model instances) at the start")
    number_of_inner_steps_between_outers: PositiveInt = key(20, "inner steps H of every worker in a round")
    inner_steps_rule: str = key(
        "fixed",
        "inner steps of a round: H (fixed), or max(H, (inner_steps_alpha / learning rate)^2) (quadratic), so that "
        "rounds lengthen as the learning rate decays",
        choices=True,
    )
    inner_steps_alpha: PositiveFloat | None = key(
        None,
        "alpha of the quadratic rule; null: the base learning rate times sqrt(H), with which rounds lengthen whenever "
        "the learning rate falls",
    )
    node_schedule: (
        Annotated[
            list[Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]],
            Field(min_length=1),
        ]
        | None
    ) = key(
        None,
        "nodes that come and go: pairs of a share of the run (the first 0) and how many nodes work from there on, the "
        "first ones of the run; null: always all",
    )
    participants: Fraction = key(
        1.0,
        "share of a trainer's workers, at least one, that take part in a round, drawn anew for each; the others rest",
    )
    message_loss: BelowOne = key(
        0.0,
        "probability with which what a worker sends at the end of a round is lost: it goes on from its own parameters "
        "until its next exchange, and keeps a copy of them",
    )
    drop_slow_nodes: AtLeastOne | None = key(
        None,
        "a node that takes more than so many times the median time per example of the others, in three rounds running "
        "and without the first step of each, works no more; null: the others wait for it",
    )
    node_speeds: Annotated[list[PositiveFloat], Field(min_length=1)] | None = key(
        None,
        "examples per second of every node, one number each, to simulate nodes that differ: they set shares and a "
        "virtual clock, and slow nothing down; null: as measured",
    )
    balance: Literal["equal", "batch", "steps"] = key(
        "equal",
        "what a trainer's workers do where their nodes differ in speed: equal shares of its batch; shares in "
        "proportion to speed, so that all are done together; or equal shares, and fewer inner steps of a round for "
        "slower ones",
    )
    balance_hysteresis: NonNegativeFloat = key(
        0.1,
        "with measured speeds, shares change only where a trainer would make more examples per second by more than "
        "this share",
    )
    redistribution_hysteresis: NonNegativeFloat = key(
        0.25,
        "a node moves to another trainer only where that one's request per node would, with it, still be larger than "
        "the giver's is now by more than this share; 0: whenever proportions say so",
    )
    redistribute_horizon: PositiveInt | None = key(
        None,
        "with balance batch or steps, trainers get compute by the speeds of nodes, not numbers of nodes, in proportion "
        "to their requests, and nodes move where that gains more time in so many rounds than it takes to send what is "
        "needed; null: nodes are alike",
    )
    joining_moments: Literal["copy", "zero"] = key(
        "copy",
        "AdamW moments of a worker that joins, or whose own were lost: those of the trainer's first worker, or none, "
        "which sends less",
    )
    distributed_algo: str = key(
        "DiLoCo", "how the workers of a trainer come together: what they send each other, and when", choices=True
    )
    synchronisation: dict[str, Any] = key({}, "parameters of distributed_algo; docs/methods.md has those of each")

    # Optimisers
    learning_rate_for_inner_opt: PositiveFloat = key(1e-3, "base learning rate of the inner optimiser")
    inner_optimizer: str | None = key(
        None,
        "optimiser of the inner steps; muon: Muon for the matrices inside the model, AdamW for the rest; null: that of "
        "distributed_algo",
        choices=True,
    )
    muon_momentum: BelowOne = key(0.95, "Nesterov momentum of Muon")
    lr_sgd: PositiveFloat | None = key(None, "inner learning rate of SGD; null: learning_rate_for_inner_opt")
    learning_rate_for_outer_opt: PositiveFloat = key(0.7, "learning rate of the outer step, where there is one")
    outer_momentum: BelowOne = key(0.9, "momentum of the outer step, where there is one")
    weight_decay: NonNegativeFloat = key(
        0.1,
        "decoupled weight decay of the inner steps, but for sgd, on every parameter: norms, biases, embeddings as well",
    )
    adam_betas: Annotated[list[BelowOne], Field(min_length=2, max_length=2)] = key(
        [0.9, 0.99], "betas of the inner AdamW"
    )
    adam_epsilon: PositiveFloat = key(1e-8, "epsilon of the inner AdamW")
    gradient_clipping: PositiveFloat | None = key(1.0, "largest norm of an inner step's gradient; null: no clipping")
    warmup_steps: NonNegativeInt = key(0, "inner steps over which the inner learning rate grows linearly")
    warmup_tokens: NonNegativeInt = key(
        0,
        "tokens of a trainer over which the inner learning rate grows linearly; the slower of the two warm-ups counts",
    )
    learning_rate_schedule: str = key("constant", "inner learning rate over the run", choices=True)
    decay_share: Annotated[float, Field(gt=0, le=1), Number] = key(
        0.2, "warmup_stable_decay: the last share of the run, in which the learning rate falls"
    )
    decay_shape: str = key("linear", "warmup_stable_decay: how it falls", choices=True)
    minimum_learning_rate_ratio: Annotated[float, Field(ge=0, le=1), Number] = key(
        0.1, "what a schedule leaves of the base learning rate at the end"
    )
    learning_rate_scaling: str = key(
        "none", "growth of the inner learning rate with a worker's effective batch, against its first", choices=True
    )

    # Batch
    INITIAL_BATCH_SIZE: PositiveInt = key(
        8, "requested batch of every trainer in the first round, in examples over all its workers"
    )
    sampling_method: str = key("norm_test", "batch test that sets the requested batch", choices=True)
    ETA: PositiveFloat = key(2.0, "eta of the norm test")
    ETA_at_end: PositiveFloat | None = key(
        0.9, "eta of the norm test at the end of the run, approached linearly from ETA; null: ETA throughout"
    )
    vartheta: PositiveFloat = key(0.9, "theta of the inner product test")
    nu: PositiveFloat = key(5.84, "nu of the augmented inner product test")
    debias: bool = key(
        True, "batch tests against the estimate of the true gradient instead of the noisy one of the whole batch"
    )
    statistics_estimator: str = key("per_example", "where the gradient statistics come from", choices=True)
    statistics_within_island: bool = key(
        False,
        "statistics_estimator across_workers: the gradients of the devices of an island are compared, each of its part "
        "of a micro-batch, and not those of whole workers",
    )
    statistics_batch_size: Annotated[int, Field(ge=2), Number] = key(
        8, "smallest sample of per_example; workers with smaller steps use a probe batch of this size as well"
    )
    batch_test_start: PositiveInt = key(
        3, "first round with a batch test: before it gradients are not yet those of training, and the batch stays"
    )
    batch_test_confidence: NonNegativeFloat = key(
        2.0,
        "standard errors by which a batch test's answer is lowered, so that the request grows only as far as the "
        "statistics are sure; 0: the estimate itself, as in the papers",
    )
    statistics_smoothing: BelowOne = key(
        0.9,
        "weight of the past in the moving average of the statistics over rounds, for equal numbers of examples; a "
        "round with more of them counts more",
    )
    max_batch_growth: AtLeastOne = key(2.0, "largest factor by which a request grows in a round")
    max_requested_batch: PositiveInt | None = key(None, "largest request; null: the examples in the trainer's subset")
    batch_schedule: list[Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]] | None = key(
        None,
        "a schedule by hand, with sampling_method none: pairs of a share of the run (0 to 1) and the requested batch "
        "from there on; null: the batch stays",
    )

    communication_budget: PositiveInt | None = key(
        None,
        "communications that the run should spend its tokens, or epochs, with; budget_sets says what is planned for "
        "that after every round; null: no such budget",
    )
    byte_budget: PositiveInt | None = key(
        None, "the same in bytes communicated: synchronisations, merges and redistribution; null: no such budget"
    )
    time_budget: PositiveFloat | None = key(
        None,
        "the same in seconds: of training as measured here, plus those of a link of link_bits_per_second; null: no "
        "such budget",
    )
    link_bits_per_second: PositiveFloat | None = key(
        None,
        "time_budget, node_speeds and redistribute_horizon: how fast the link is that connects a node with the others; "
        "null: with node_speeds sending takes no time",
    )
    link_latency_seconds: NonNegativeFloat = key(
        0.0, "seconds until all nodes have begun and ended an exchange over that link"
    )
    budget_sets: Literal["inner_steps", "batch"] = key(
        "inner_steps",
        "what a budget sets: the inner steps of rounds that communicate, with batches as sampling_method says, or the "
        "batch, with rounds of number_of_inner_steps_between_outers",
    )
    budget_growth: NonNegativeFloat = key(
        1.0, "how much batches of a budget grow as there is less learning rate to come; 0: not"
    )
    budget_noise: NonNegativeFloat = key(
        0.5, "exponent with which batches of a budget follow the measured noise scale; 0: not at all"
    )

    # Switch mode and memory
    switch_mode: str = key("threshold_switch_mode", "when to accumulate gradients", choices=True)
    switch_multiplier: PositiveInt = key(2, "threshold_switch_mode accumulates above this multiple of the max batch")
    max_batch_size: PositiveInt | None = key(None, "largest micro-batch; null: measured from the device's memory")
    padding_percentage: Fraction = key(0.9, "share of a device's memory that may be used")

    # Merging
    merging_policy: str = key(
        "worst_with_worst",
        "which trainers merge: those with the smallest requests, or the largest with the smallest",
        choices=True,
    )
    merge_frequency: PositiveInt = key(2, "rounds between merges, while more than one trainer lives")
    merge_count: Annotated[int, Field(ge=2), Number] = key(2, "trainers that become one in a merge")
    outer_momentum_at_merge: Literal["average", "reset"] = key(
        "average", "outer momentum of a merged trainer: the weighted average of those that merge, or zero"
    )
    inner_state_at_merge: Literal["keep", "reset"] = key(
        "keep", "AdamW moments of a merged trainer's workers: the representative's, or as at the start of the run"
    )

    # Evaluation
    eval_every: PositiveInt = key(
        1, "evaluate the living trainers every so many rounds, and at the end", changes_training=False
    )
    eval_batch_size: PositiveInt = key(16, "examples per batch in evaluation", changes_training=False)
    validation_per_share: bool = key(
        False,
        "evaluate on the validation documents of each share of data_split as well, which takes as long again",
        changes_training=False,
    )

    @property
    def budget(self) -> str | None:
        """The key of the budget that the run has, if it has one."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), None)

    @property
    def compares_workers(self) -> bool:
        """Whether the statistics are of the gradients of whole workers, which they send each other."""
        return self.statistics_estimator == "across_workers" and not self.statistics_within_island

    @property
    def splits_data(self) -> bool:
        """Whether examples are in shares of their own, and not drawn at random by trainers."""
        return self.data_split != "iid" or self.data_split_over == "workers"

    @property
    def plans_batches(self) -> bool:
        """Whether a budget sets the batch."""
        return self.budget is not None and self.budget_sets == "batch"


FIELDS = {entry.name: entry for entry in dataclasses.fields(Config)}
