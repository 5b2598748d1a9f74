"""How good trainers are on each share of data that differ: share_log.csv, and what the summary says of shares."""

from collections.abc import Iterator

from fabrics.data.examples import DataShares
from fabrics.pool.eval_tool import Evaluation
from training_logs.recording.records import ClusterRound

COLUMNS = ("outer_step", "trainer_id", "share", "validation_loss", "validation_metric")


def share_rows(result: ClusterRound) -> Iterator[tuple]:
    """A row for every trainer and share of a round that was evaluated by share."""
    for trainer, evaluation in result.evaluations.items():
        for share, own in enumerate(evaluation.shares):
            if own is not None:
                yield result.outer_step, trainer, share, own.loss, own.metric


def share_summary(shares: DataShares | None, best: Evaluation | None) -> dict | None:
    """The shares as JSON values; best: the final evaluation of the best trainer, where there is one."""
    if shares is None:
        return None
    metrics = [own and own.metric for own in best.shares] if best else []
    entries = [
        entry | ({"final_metric": metrics[number]} if metrics else {})
        for number, entry in enumerate(shares.record["shares"])
    ]
    return {**shares.record, "shares": entries}
