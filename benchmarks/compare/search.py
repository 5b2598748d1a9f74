"""Equal tuning: every method gets as many tuning runs, by random search with successive halving on the tokens.

Settings are drawn and run with a share of the tokens (arXiv 1502.07943); the best third of a rung is run with three
times as many, and so on until all tokens (`reduction`). Every run counts as one, whatever its length, and all methods
have the same rungs, so that they spend the same tokens as well. What is left of the budget is spent with all tokens:
one step beyond the edges that the best lies at, where it does, else on the best of what had been dropped.
"""

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.plan import Comparison, Method, Run, draws, make_run, method_space, with_settings
from benchmarks.compare.search_space import Range, Search, Settings, Side, Space, beyond, edge, is_ordered, position
from utils.config.schema import ConfigError

# Why a run was made, and why nothing was run beyond an edge.
DRAWN, KEPT, BEYOND, NEXT = "drawn", "kept", "beyond an edge", "next best"
NO_BUDGET, NOT_ALLOWED = "nothing left of the budget", "nothing beyond is allowed"


@dataclass(frozen=True)
class Trial:
    """A run of a search: its settings, its rung, why it was made, and its loss (inf: it did not come to its end)."""

    settings: Settings
    rung: int
    why: str
    loss: float


@dataclass(frozen=True)
class Found:
    """What a search came to: its runs, and for each key of which the best of the rungs lay at an edge the values that
    were run beyond it, or why none were."""

    trials: list[Trial]
    further: dict[str, list[float] | str]

    @property
    def best(self) -> Trial:
        """The best of those with all tokens, whose rung is the last."""
        last = max(trial.rung for trial in self.trials)
        return min((trial for trial in self.trials if trial.rung == last), key=lambda trial: trial.loss)


# Settings -> the id of their run; None where their configuration is wrong.
Identify = Callable[[Settings], str | None]
Asked = tuple[int, Sequence[Settings], str]


def edges(space: Space, settings: Settings, identify: Identify) -> dict[str, tuple[float, Side | None]]:
    """Where the values of ordered keys that have an effect lie in what was searched, 0 to 1, and at which edge."""
    found = {}
    for key, values in space.items():
        ends = (values.low, values.high) if isinstance(values, Range) else values
        if is_ordered(values) and len({identify({**settings, key: value}) for value in ends}) > 1:
            found[key] = round(position(values, settings[key]), 3), edge(values, settings[key])
    return found


def tuning(
    search: Search, space: Space, drawn: Sequence[Settings], identify: Identify
) -> Generator[Asked, Sequence[float], Found]:
    """The search of one method: yields the rung and settings of runs, and why they are made; is sent their losses."""
    sizes = search.sizes(len(drawn))
    left, last = search.budget - sum(count for _, count in sizes), search.rungs - 1
    trials: list[Trial] = []

    def ranked(rung: int, settings: Sequence[Settings], why: str):
        losses = yield rung, settings, why
        trials.extend(Trial(entry, rung, why, loss) for entry, loss in zip(settings, losses, strict=True))
        return [settings[index] for index in sorted(range(len(settings)), key=losses.__getitem__)]

    candidates, waiting = list(drawn[: sizes[0][1]]), list(drawn[sizes[0][1] :])
    for index, (rung, count) in enumerate(sizes):
        candidates, waiting = candidates[:count], candidates[count:] + waiting
        candidates = yield from ranked(rung, candidates, KEPT if index else DRAWN)
    best, kept = candidates[0], max(1, len(candidates) // search.reduction)
    further, outside = {}, []
    for key, (_, side) in edges(space, best, identify).items():
        if side is None:
            continue
        count = min(kept, left - len(outside))
        steps = dict.fromkeys(beyond(space[key], side, number, count) for number in range(count))
        values = [value for value in steps if identify({**best, key: value}) not in (None, identify(best))]
        further[key] = values or (NOT_ALLOWED if count else NO_BUDGET)
        outside += [{**best, key: value} for value in values]
    for settings, why in ((outside, BEYOND), (waiting[: left - len(outside)], NEXT)):
        if settings:
            yield from ranked(last, settings, why)
    return Found(trials, further)


@dataclass(frozen=True)
class Measured:
    """What runs ended with: id -> metric, None where a run did not come to its end; whether a higher one is better."""

    metrics: Mapping[str, float | None]
    higher_is_better: bool

    def loss(self, run: Run) -> float:
        """Smaller is better."""
        metric = self.metrics[run.id]
        return math.inf if metric is None else -metric if self.higher_is_better else metric


def search_methods(comparison: Comparison, measure: Callable[[list[Run], str], Measured]) -> dict[str, dict[str, Any]]:
    """Tune all methods of a comparison with a search, rung by rung side by side; what was found, as JSON values.

    Args:
        measure: makes runs, given words for them.
    """
    search, seed, found = comparison.search, comparison.seeds[0], {}

    def run_of(method: Method, settings: Settings, rung: int) -> Run:
        return make_run(comparison, with_settings(method, settings), None, seed, search.share(rung))

    def identify_for(method: Method) -> Identify:
        def identify(settings: Settings) -> str | None:
            try:
                return run_of(method, settings, search.rungs - 1).id
            except ConfigError:
                return None

        return identify

    methods = {method.name: method for method in comparison.methods}
    spaces = {name: method_space(comparison, method) for name, method in methods.items()}
    tunings = {
        name: tuning(search, spaces[name], draws(comparison, method), identify_for(method))
        for name, method in methods.items()
    }
    asked = {name: next(steps) for name, steps in tunings.items()}
    metrics: dict[str, float | None] = {}
    while asked:
        runs = {
            name: [run_of(methods[name], entry, rung) for entry in settings]
            for name, (rung, settings, _) in asked.items()
        }
        rungs = " and ".join(str(rung + 1) for rung in sorted({rung for rung, _, _ in asked.values()}))
        measured = measure([run for entries in runs.values() for run in entries], f"search, rung {rungs}")
        metrics |= measured.metrics
        for name, entries in runs.items():
            try:
                asked[name] = tunings[name].send([measured.loss(run) for run in entries])
            except StopIteration as ended:
                del asked[name]
                found[name] = ended.value
    return {
        name: _as_values(found[name], spaces[name], methods[name], run_of, metrics, identify_for(methods[name]))
        for name in methods
    }


def _as_values(
    found: Found,
    space: Space,
    method: Method,
    run_of: Callable[[Method, Settings, int], Run],
    metrics: Mapping[str, float | None],
    identify: Identify,
) -> dict[str, Any]:
    runs = []
    for trial in found.trials:
        id = run_of(method, trial.settings, trial.rung).id
        runs.append({"values": trial.settings, "rung": trial.rung, "why": trial.why, "id": id, "metric": metrics[id]})
    best = found.best
    where = {
        key: {"position": place, "edge": side, "further": found.further.get(key)}
        for key, (place, side) in edges(space, best.settings, identify).items()
    }
    return {
        "best": best.settings,
        "metric": metrics[run_of(method, best.settings, best.rung).id],
        "edges": where,
        "runs": runs,
    }


def found_values(path: Path, comparison: Comparison, results: Path) -> dict[str, dict[str, Any]]:
    """What the comparison that this one is tuned on found for its methods, by name; for those that it lacks nothing.

    Args:
        path: of this comparison. results: the folder of all results.

    Raises:
        ConfigError: they are not there, or hold no values that were found.
    """
    there = results / f"{comparison.tuned_on}.json"
    if not there.exists():
        raise ConfigError(f"{path}: tuned_on: {there} is not there: make the runs of {comparison.tuned_on} first")
    raw = json.loads(there.read_text(encoding="utf-8"))
    if "search" in raw:
        found = {name: entry["best"] for name, entry in raw["search"].items()}
    else:
        found = {name: {key: raw["best"][name]} for name, (key, _) in raw["grids"].items() if key}
    strangers = sorted({method.tuned_as for method in comparison.methods if method.tuned_as} - found.keys())
    if strangers:
        raise ConfigError(f"{path}: tuned_as: {there} has found no values for {', '.join(strangers)}")
    names = {method.name: method.tuned_as or method.name for method in comparison.methods}
    own = {name: found[tuned] for name, tuned in names.items() if tuned in found}
    if not own:
        raise ConfigError(f"{path}: tuned_on: {there} holds no values for any of these methods")
    return own
