"""Draw plots and report of a run folder again, or compare several runs:

python -m training_logs.training_monitoring RUN_DIR
python -m training_logs.training_monitoring RUN_DIR RUN_DIR [...] [--output FOLDER]
"""

import argparse
import html
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from training_logs.showing.plots import plot_run
from training_logs.showing.report import headline, page, picture, setting, table, write_report
from training_logs.showing.run_data import RunData, RunFolderError, damage_reported, read_run
from training_logs.showing.styles import OVER, colour, decimal_logarithmic, draw_line, label_axes, literal, make_figure
from utils.files import path_argument, write_atomically, write_text_atomically

# Keys without influence on results.
_PLACES = ("log_dir", "cache_dir")
OTHER_DATA = "The runs have different data (data_digest in summary.json): their metrics are not comparable."
_COMPARED = ("tokens", "communications", "bytes_communicated", "wall_seconds")


def draw(folder: Path) -> Path:
    """Draw plots and report of a run folder; return the path of the report.

    Raises:
        RunFolderError: it is not a run folder, or is damaged.
    """
    with damage_reported(folder):
        run = read_run(folder)
        plot_run(run)
        return write_report(run)


def differences(runs: Sequence[RunData]) -> dict[str, list]:
    """Return the keys whose values differ between the runs, with the values."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _PLACES)
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def differ_in_data(runs: Sequence[RunData]) -> bool:
    """Return whether the runs have other training or validation data."""
    return len({run.summary.get("data_digest") for run in runs}) > 1


def _names(runs: Sequence[RunData]) -> list[str]:
    """Return the runs' own names, or those of their folders; paths where names are equal."""
    names = [str(run.config.get("run_name") or run.name) for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def draw_comparison(runs: Sequence[RunData]) -> Figure:
    """Draw the best metric over tokens, communications, bytes and seconds; every metric has its own panels.

    Seconds count from the end of the start-up, whose length depends on what is cached.
    """
    metrics = dict.fromkeys(run.metric.name for run in runs)
    panels = [(metric, x) for metric in metrics for x in _COMPARED]
    figure, axes = make_figure(len(panels))
    for place, (metric, x) in zip(axes, panels, strict=True):
        for index, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
            if run.metric.name == metric:
                pattern = ("-", "--", ":", "-.")[index // 10 % 4]  # colours repeat after ten
                draw_line(place, *run.best_metrics(x), color=colour(index), ls=pattern, label=literal(name))
        if metric == "perplexity":
            decimal_logarithmic(place)
        usage_label = OVER[x]
        if x == "wall_seconds":
            usage_label = "seconds on this machine after the start-up, evaluation included"
        title = f"{metric.capitalize()} over {usage_label.split(',')[0]}"
        label_axes(place, x, f"best {metric} of the living trainers", title)
        place.set_xlabel(usage_label)
        place.legend(fontsize=8)
    return figure


def compare(runs: Sequence[RunData], output: Path) -> Path:
    """Write comparison.png and comparison.html into a folder; return the path of the page."""
    names = _names(runs)
    headlines = []
    for run in runs:
        with damage_reported(run.folder):
            headlines.append(headline(run))
            for x in _COMPARED:  # damage is noticed while its run is known
                run.best_metrics(x)
    image = output / "comparison.png"
    write_atomically(image, lambda path: draw_comparison(runs).savefig(path, dpi=110))
    # A run with a budget, or with a simulated time, has numbers that others lack.
    labels = dict.fromkeys(label for values in headlines for label in values)
    body = [
        "<h1>Comparison</h1>",
        f"<p class=dim>{html.escape(', '.join(names))}</p>",
        f"<p>{OTHER_DATA}</p>" if differ_in_data(runs) else "",
        picture(image),
        "<h2>Numbers</h2>",
        table(("", *names), [(label, *(values.get(label, "-") for values in headlines)) for label in labels]),
        "<h2>Differences of the configurations</h2>",
        table(("key", *names), [(key, *map(setting, values)) for key, values in differences(runs).items()]),
    ]
    path = output / "comparison.html"
    write_text_atomically(path, page("Comparison", "".join(body)))
    return path


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 2 if a folder is not a run folder, or a file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.training_monitoring",
        description="Draw plots and report of a run folder again, or compare several runs.",
    )
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN_DIR")
    parser.add_argument(
        "--output",
        type=path_argument,
        default=Path("comparison"),
        help="folder of the comparison; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    try:
        if len(options.runs) == 1:
            print(draw(options.runs[0]))
            return 0
        runs = [read_run(folder) for folder in options.runs]
        if differ_in_data(runs):
            print(OTHER_DATA)
        print(compare(runs, options.output))
    except (RunFolderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit removes half-written files
    sys.exit(main())
