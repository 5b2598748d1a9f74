"""The budget that a configuration gives a run: what it counts, what bounds its batches, and where it cannot be kept."""

from collections.abc import Callable, Sequence

from algorithms.batch.budget import Budget, Outlook, largest_planned
from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.communication_rounds import Link
from utils.config.schema import BUDGETS, Config, ConfigError

# Of a budget of seconds, in which all that is to come is estimated, nothing is said to be missing below this share.
_ESTIMATED = 0.05


def budget_of(config: Config) -> Budget | None:
    """The budget of a run; None: it has none."""
    if config.budget is None:
        return None
    unit, amount = BUDGETS[config.budget], getattr(config, config.budget)
    if unit != "seconds":
        return Budget(unit, amount)
    return Budget(unit, amount, Link(config.link_bits_per_second, config.link_latency_seconds))


def check_budget(config: Config, nodes: int) -> None:
    """Raise ConfigError where a run with a budget never communicates."""
    if config.budget is not None and nodes == 1:
        raise ConfigError(
            f"{config.budget}: a run on one node never communicates; raise nodes_per_gpu, or use more devices"
        )


def examples_left(config: Config, examples: int, tokens: int, tokens_each: float, epoch: int) -> float:
    """Examples until the tokens, or epochs, that the config gives are used up.

    Args:
        examples, tokens: that are done.
        tokens_each: of an example, on average.
        epoch: examples of one.
    """
    left = []
    if config.max_tokens:
        left.append((config.max_tokens - tokens) / tokens_each)
    if config.number_of_training_epochs:
        left.append(config.number_of_training_epochs * epoch - examples)
    return min(left)


def largest_step(config: Config, max_batches: Sequence[int], data: int, useful: int) -> Callable[[Sequence[int]], int]:
    """From the nodes of each trainer to the most examples that an inner step of all of them may have.

    Args:
        max_batches: of all nodes that work.
        data: examples that all trainers have together.
        useful: examples of an inner step beyond which nothing is asked.
    """

    def examples(shares: Sequence[int]) -> int:
        found, first = 0, 0
        for workers in shares:
            bound = largest_planned(config.max_requested_batch or data // len(shares), workers)
            request = min(bound, -(-useful // workers) * workers)
            nodes = [max_batches[(first + worker) % len(max_batches)] for worker in range(workers)]
            plans = execution_plans(config.switch_mode, request, nodes, config.switch_multiplier)
            found, first = found + sum(plan.effective_batch for plan in plans), first + workers
        return found

    return examples


def shortfall(config: Config, budget: Budget, outlook: Outlook) -> str | None:
    """What to warn of where the run cannot keep its budget; None: it can, as far as is known."""
    if outlook.missing <= (budget.amount * _ESTIMATED if budget.unit == "seconds" else 0.0):
        return None
    rounds = "one more round" if outlook.rounds == 1 else f"{outlook.rounds} more rounds with the largest batches"
    return (
        f"{config.budget}: {budget.amount:,.10g} {budget.unit} cannot be kept: what is left to train takes {rounds} "
        f"at least, for which {outlook.missing:,.10g} {budget.unit} are missing"
    )
