"""What nodes sent each other in a round: rows of exchange_log.csv, as few as there are kinds of exchanges."""

from collections.abc import Iterable, Sequence

import numpy as np

from algorithms.nodes.transfers import Move
from algorithms.synchronisation.method import Event
from training_logs.recording.records import RoundReport

# Bytes are those of each node in one exchange, the mean over those that the row counts. sources, targets: nodes that
# sent and got them; empty where all the trainer's workers of the round did both.
COLUMNS = (
    "outer_step",
    "trainer_id",
    "kind",
    "through",
    "count",
    "sent_bytes",
    "received_bytes",
    "behind",
    "first_step",
    "last_step",
    "sources",
    "targets",
)


def exchange_rows(outer_step: int, reports: Iterable[RoundReport], moves: Sequence[Move] = ()) -> list[tuple]:
    """One row per trainer and kind of exchanges that are alike; one per transfer as nodes moved and trainers merged."""
    rows, inner_steps = [], 0
    for report in reports:
        inner_steps = report.inner_steps
        alike: dict[tuple, list[Event]] = {}
        for event in report.events:
            alike.setdefault((event.kind, event.through, event.behind), []).append(event)
        for (kind, through, behind), events in alike.items():
            sent, received = (float(np.mean([getattr(e, name) for e in events])) for name in ("sent", "received"))
            steps = [event.step for event in events]
            place = (outer_step, report.trainer, kind, through)
            rows.append((*place, len(events), sent, received, behind, min(steps), max(steps), "", ""))
    return rows + [_move_row(outer_step, move, inner_steps) for move in moves]


def _move_row(outer_step: int, move: Move, inner_steps: int) -> tuple:
    """Nodes move before the first inner step of a round, trainers merge after the last."""
    transfer, step = move.transfer, inner_steps if move.kind == "merge" else 0
    through = "all" if transfer.sources == transfer.targets else "direct"
    sent = transfer.total / max(1, len(transfer.sources))
    nodes = (" ".join(map(str, nodes)) for nodes in (transfer.sources, transfer.targets))
    return (outer_step, move.trainer, move.kind, through, 1, sent, transfer.arriving, 0, step, step, *nodes)
