"""report.html: a run in one file, with its plots inside."""

import base64
import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training_logs.showing.plots import plots_of
from training_logs.showing.run_data import RunData, damage_reported
from utils.config.schema import FIELDS, Config
from utils.files import write_text_atomically
from utils.text import budget_used, byte_size

# The most rows of the table of rounds; the last ones are shown.
MOST_ROWS = 500
# Results of lm_eval (EleutherAI's lm-evaluation-harness) in a run folder.
_EVALUATION_FOLDER = "evaluation"
_PLOTS = (
    "Vertical lines are merges. The best metric is that of the best living trainer. In the panel of batches, circles "
    "are batches as run, filled where they are accumulated. docs/run_folder.md describes every plot."
)

_STYLE = """
:root { --ink: #1c2430; --dim: #5d6b7c; --line: #dde3ea; --paper: #fff; --ground: #f4f6f9; --accent: #1f5fa8; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: var(--ink);
       background: var(--ground); }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 34px 0 10px; }
.dim { color: var(--dim); margin: 0; overflow-wrap: anywhere; }
.status { display: inline-block; padding: 1px 10px; border-radius: 99px; font-size: .85rem; color: #fff;
          background: #8a5a00; vertical-align: middle; }
.status.completed { background: #1d7a3c; } .status.failed { background: #b00020; }
.warnings { background: #fff4e0; border: 1px solid #e8b95b; border-radius: 8px; padding: 10px 14px; margin: 16px 0;
            overflow-wrap: anywhere; }
.warnings ul { margin: 4px 0 0; padding-left: 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 18px 0; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; } .card span { color: var(--dim);
          font-size: .85rem; }
figure { margin: 0 0 14px; background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 8px; }
figure { overflow-x: auto; } img { display: block; max-width: max(100%, 720px); height: auto; }
.scroll { overflow: auto; max-height: 460px; background: var(--paper); border: 1px solid var(--line);
          border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.wide { white-space: normal; overflow-wrap: anywhere; min-width: 160px; }
th { position: sticky; top: 0; background: #eef2f7; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tr.changed td { background: #eef5ff; }
details summary { cursor: pointer; color: var(--accent); margin: 8px 0; }
"""


def number(value: Any) -> str:
    """Format a value: yes, no, or - for None; thousands separated, five digits of a fraction."""
    if value is None or value != value:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


def setting(value: Any) -> str:
    """Format the value of a configuration key as YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], shaded: Sequence[bool] = (), total: int | None = None
) -> str:
    """Return an HTML table in a box that scrolls.

    Args:
        shaded: for each row, whether it is shaded.
        total: number of rows, of which these are the last; None: these are all.
    """
    lines = []
    for place, row in enumerate(rows):
        cells = [cell if isinstance(cell, str) else number(cell) for cell in row]
        marked = " class=changed" if shaded and shaded[place] else ""
        shown = "".join(f"<td{' class=wide' if len(cell) > 40 else ''}>{html.escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr{marked}>{shown}</tr>")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(lines)
    note = ""
    if total is not None and total > len(lines):
        note = f"<p class=dim>The last {len(lines)} of {total:,} rows; all are in the CSVs.</p>"
    return f"{note}<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def picture(path: Path) -> str:
    """Return an image inside the page."""
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def page(title: str, body: str) -> str:
    """Return an HTML document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def downstream_results(run_folder: Path) -> dict[str, str]:
    """Return the metrics of tasks, as "task, metric": "value ± standard error"; empty without results.

    Of a metric with several results the newest counts.

    Raises:
        RunFolderError: a file is not a result of lm_eval.
    """
    found: dict[str, str] = {}
    # The name of a file is its time; its folder is named by the model.
    for path in sorted((run_folder / _EVALUATION_FOLDER).glob("**/results_*.json"), key=lambda path: path.name):
        with damage_reported(path):
            tasks = json.loads(path.read_text(encoding="utf-8"))["results"]
            for task, values in tasks.items():
                for key, value in values.items():
                    metric, _, filtered = key.partition(",")  # acc,none: "none" is the filter of answers
                    if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                        continue
                    error = values.get(f"{metric}_stderr,{filtered}")
                    shown = f"{value:.4g} ± {error:.2g}" if isinstance(error, int | float) else f"{value:.4g}"
                    label = f"{task}, {metric}" if filtered == "none" else f"{task}, {metric} ({filtered})"
                    label.encode()  # fails for half a surrogate pair, which no page could be written with
                    found[label] = shown
    return found


def headline(run: RunData) -> dict[str, str]:
    """Return the main numbers of a run; "-" stands for numbers that only its end gives."""
    summary = run.summary
    name = run.metric.name
    metrics = run.rounds["validation_metric"] if len(run.rounds) else np.empty(0)
    metrics = metrics[np.isfinite(metrics)]
    best = run.metric.best(metrics) if len(metrics) else None

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.{run.metric.decimals}f}"

    values = {
        f"{name}, at the end": shown(summary["final_metric"]),
        f"{name}, before training": shown(summary["initial_metric"]),
        f"{name}, best in a round": shown(best),
        "rounds": number(summary["outer_steps"]),
        "training tokens": number(summary["tokens"]),
        "communications": number(summary["communications"]),
        "communicated": byte_size(summary["bytes_communicated"]),
        "trainers, first and last": f"{summary['initial_trainers']} → {summary['final_trainers']}",
        "largest requested batch": number(summary["largest_requested_batch"]),
        "seconds, start-up included": f"{summary['wall_seconds']:,.0f}",
    }
    if summary.get("budget"):
        values["budget"] = budget_used(summary["budget"])
    if summary.get("simulated_seconds") is not None:
        values["simulated seconds"] = number(summary["simulated_seconds"])
    if summary.get("idle_share") is not None:
        values["nodes are idle"] = f"{summary['idle_share']:.1%} of the time"
    if summary.get("waiting_share") is not None:
        values["nodes wait"] = f"{summary['waiting_share']:.1%} of the rest"
    if summary.get("alone_share"):
        values["one worker works alone"] = f"{summary['alone_share']:.0%} of the rounds"
    return values | downstream_results(run.folder)


# Sections: each returns "" for a run without its subject.


def _cards(values: Mapping[str, str]) -> str:
    cells = "".join(
        f"<div class=card><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in values.items()
    )
    return f"<div class=cards>{cells}</div>"


def _error(run: RunData) -> str:
    error = run.summary.get("error")
    return f"<div class=warnings><b>Error</b> {html.escape(error)}</div>" if error else ""


def _warnings(run: RunData) -> str:
    items = ""
    for warning in run.summary.get("warnings", ()):
        times = f" ({number(warning['count'])} times)" if warning["count"] > 1 else ""
        items += f"<li>{html.escape(warning['message'] + times)}</li>"
    return f"<div class=warnings><b>Warnings</b><ul>{items}</ul></div>" if items else ""


def _plots(run: RunData) -> str:
    if not len(run.rounds):
        return ""
    pictures = "".join(picture(run.report_dir / name) for name in plots_of(run))
    return f"<h2>Plots</h2><p class=dim>{_PLOTS}</p>{pictures}"


def _merges(run: RunData) -> str:
    rows = []
    for outer_step, merge in run.merges.items():
        parts = ", ".join(f"trainer {trainer} ({weight:.2f})" for trainer, weight in merge.weights.items())
        rows.append((f"after round {outer_step}", f"trainer {merge.representative}", parts))
    return "<h2>Merges</h2>" + table(("when", "what remains", "weighted average of"), rows) if rows else ""


_ROUND_COLUMNS = {
    "round": "outer_step", "trainer": "trainer_id", "nodes": "nodes", "requested": "requested_batch",
    "effective": "effective_batch", "micro-batch": "micro_batch", "accumulation": "accumulation_steps",
    "training loss": "train_loss", "validation loss": "validation_loss", "metric": "validation_metric",
    "tokens": "tokens", "communications": "communications",
    "gradient variance": "gradient_variance", "squared norm": "gradient_squared_norm", "seconds": "seconds",
}  # fmt: skip


def _rounds(run: RunData) -> str:
    rows = [[row[column] for column in _ROUND_COLUMNS.values()] for row in run.rounds[-MOST_ROWS:]]
    names = [run.metric.name if name == "metric" else name for name in _ROUND_COLUMNS]
    return "<h2>Rounds</h2>" + table(names, rows, total=len(run.rounds))


def _machine(machine: Mapping[str, Any]) -> str:
    gpus = Counter(gpu["name"] for gpu in machine["gpus"])
    parts = [machine["cpu"], f"{machine['usable_cores']} cores", *(f"{count} x {name}" for name, count in gpus.items())]
    return f"{machine['host']}: {', '.join(parts)}"


def _origin(run: RunData) -> str:
    rows = []
    for invocation in run.summary.get("invocations", ()):
        difference = f"in {invocation['patch']}" if invocation["patch"] else number(invocation["changed"])
        machines = "; ".join(map(_machine, invocation["hardware"]))
        plugins = ", ".join(f"{entry['path']} ({entry['sha256'][:16]})" for entry in invocation["plugins"])
        start = [invocation[name] for name in ("started", "first_round", "command", "commit")]
        rows.append((*start, difference, plugins or "none", machines))
    columns = ("started", "from round", "command", "commit", "changed files", "plugins", "hardware")
    return "<h2>Origin</h2>" + table(columns, rows) if rows else ""


def _details(run: RunData) -> str:
    defaults = Config()
    config = {key: value for key, value in run.config.items() if key in FIELDS}
    rows = [(key, setting(value), FIELDS[key].metadata["meaning"]) for key, value in config.items()]
    changed = [value != getattr(defaults, key) for key, value in config.items()]
    versions = ", ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items())
    return (
        "<details><summary>Configuration (what differs from the defaults is shaded)</summary>"
        f"{table(('key', 'value', 'meaning'), rows, changed)}</details><p class=dim>{html.escape(versions)}</p>"
    )


def run_body(run: RunData) -> str:
    """Return the body of the report of a run."""
    summary = run.summary
    status = html.escape(summary["status"])
    subject = f"{run.config['model_type']} on {summary['dataset']} - {summary['data_source']}"
    parts = [
        f"<h1>{html.escape(run.name)} <span class='status {status}'>{status}</span></h1>",
        f"<p class=dim>{html.escape(subject)}</p>",
        _error(run),
        _warnings(run),
        _cards(headline(run)),
        _plots(run),
        _merges(run),
        _rounds(run),
        _origin(run),
        _details(run),
    ]
    return "".join(parts)


def write_report(run: RunData) -> Path:
    """Write report.html beside the plots; return its path."""
    path = run.report_dir / "report.html"
    write_text_atomically(path, page(run.name, run_body(run)))
    return path
