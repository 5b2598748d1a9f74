"""Analyse the gradient noise of a model:

    python gradient_analysis/gradient_analysis.py [--config PATH] [key=value ...]

The script computes exact gradients on a sample of the data. It gives the deviations of batch gradients from the full
gradient, the noise scale, and the requests of all batch tests. Numbers go to CSV and JSON files, figures to PNG files.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from algorithms.batch.per_example import PerExampleProbe, UnsupportedModuleError
from fabrics.config_checks import CHECKS
from fabrics.data.dataset_loader import load_data
from fabrics.data.examples import TaskData
from fabrics.models.initialisation import initial_model
from fabrics.models.model_family import is_pretrained
from fabrics.training.flat_model import FlatModel
from gradient_analysis.gradients import BatchGradient, Gradients, draw_batches, requests
from training_logs.log_processor import ANALYSIS_SUMMARY
from training_logs.showing.run_data import RunFolderError, damage_reported, read_run
from training_logs.showing.styles import colour, make_figure
from utils.config.reading import load_config, override, problem_lines, read_mapping
from utils.config.resume import check_plugins_of_run
from utils.config.schema import Config, ConfigError, Name, NonNegativeInt, Number, PositiveInt, Threads
from utils.distributed.devices import resolve_devices
from utils.files import MODELS_FOLDER, REPORT_FOLDER, has_checkpoint, write_atomically, write_json_atomically
from utils.progress import progress_bar, shows_progress
from utils.text import counted

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, config=ConfigDict(extra="forbid", coerce_numbers_to_str=True))
class AnalysisConfig:
    """The keys of config_analyze_gradient.yaml, which explains them."""

    model: Name | None = None
    config: Name | None = None
    part: Literal["train", "validation"] = "train"
    sample_size: Annotated[int, Field(ge=3, lt=2**63), Number] | None = 512  # a standard error needs three
    batch_size: PositiveInt = 8
    micro_batch: PositiveInt = 16
    seed: NonNegativeInt = 42
    device: Name | None = None
    cpu_threads: Threads | None = None
    output_dir: Name = "gradient_plots"


def parse_analysis_config(path: Path, overrides: Sequence[str]) -> AnalysisConfig:
    """Read the file and `key=value` overrides; ConfigError: with one line per problem."""
    values = read_mapping(path)
    if "dataset" in values:
        raise ConfigError(f"{path}: the configuration of a run, not of an analysis; config=FILE names it")
    problems: list[str] = []
    for assignment in overrides:
        override(values, assignment, problems, aliases={})
    if problems:
        raise ConfigError(problems)
    try:
        return TypeAdapter(AnalysisConfig).validate_python(values)
    except ValidationError as error:
        names = [field.name for field in dataclasses.fields(AnalysisConfig)]
        raise ConfigError(problem_lines(error, values, names)) from None


# Model, data and sample


def run_folder_of(model: Path) -> Path | None:
    """Return the run folder that contains a model folder, or is it; None if there is none."""
    model = model.resolve()
    for folder in (model, *model.parents):
        if (folder / "config.yaml").is_file() and (folder / REPORT_FOLDER).is_dir():
            return folder
    return None


def resolve_model(config: AnalysisConfig) -> tuple[Config, Path | None]:
    """Return the training configuration and the model folder; None for an untrained model.

    A configuration that is given wins. Otherwise it is that of the model's run, or config.yaml for an untrained model.

    Raises:
        ConfigError: there is no such model, or no configuration for it.
    """
    model = None if config.model is None else Path(config.model)
    run = None
    if model is not None:
        if not model.is_dir():
            raise ConfigError(f"model: no such folder: {model}")
        run = run_folder_of(model)
        if not (model / "config.json").is_file():
            model /= _best_model(model)
    if config.config is not None:
        path = Path(config.config)
    elif run is not None:
        path = run / "config.yaml"
        check_plugins_of_run(run)
    elif model is None:
        path = Path("config.yaml")
    else:
        raise ConfigError(f"config: {model} is not in a run folder: name its training configuration")
    training, warnings = load_config(path, (), CHECKS)
    _warn(f"{path}: {warning}" for warning in warnings)
    if model is not None:
        if training.lora:
            _warn(["lora: adapters are merged into a run's model: the analysis is of all its parameters"])
        values = {"name": str(model), "pretrained": True}
        training = dataclasses.replace(training, model_config=values, need_to_reinit_output_layers=False, lora={})
    return training, model


def _best_model(run: Path) -> str:
    try:
        summary = read_run(run).summary
    except RunFolderError as error:
        raise ConfigError(f"model: must be a model folder or a run folder; {error}") from None
    best = summary.get("best_model")
    if best is None:
        advice = ["resume it"] if has_checkpoint(run) else []
        if (run / MODELS_FOLDER).is_dir():
            advice.append(f"name a folder in {run / MODELS_FOLDER}")
        said = ", or ".join(advice) or "start it again"
        raise ConfigError(f"model: the run in {run} has no final model (status: {summary['status']}); {said}")
    return best


def _load(config: AnalysisConfig, training: Config, device: torch.device) -> tuple[TaskData, FlatModel]:
    """Load data and model, and check that the part of the data is as large as the sample."""
    # The sample is drawn from all data, however training divided them.
    data = load_data(dataclasses.replace(training, data_split="iid", data_split_over="trainers"))
    available = len(getattr(data, config.part))
    count = available if config.sample_size is None else config.sample_size
    if count > available:
        raise ConfigError(f"sample_size: the {config.part} part has {available} examples, got {count}")
    if count < 3:
        raise ConfigError(f"sample_size: must be at least 3; the {config.part} part has {counted(count, 'example')}")
    if config.batch_size > count:
        raise ConfigError(f"batch_size: must be at most the {count} examples of the sample, got {config.batch_size}")
    try:
        working = FlatModel(initial_model(training, data, 0), device)
        PerExampleProbe(working.module, 1)
    except ConfigError:
        raise
    except UnsupportedModuleError as error:
        raise ConfigError(f"model: cannot be analysed: {error.problem}") from None
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    return data, working


def last_request(model: Path) -> int | None:
    """Return the batch for which a run's test asks at its end, if there is one and the model is the run's final one."""
    run = run_folder_of(model)
    if run is None:
        return None
    try:
        data = read_run(run)
        with damage_reported(run):
            best = data.summary.get("best_model")
            tested = data.config["sampling_method"] != "none"
            if not tested or best is None or (run / best).resolve() != model.resolve():
                return None
            return int(data.by_trainer[data.summary["best_trainer"]]["next_requested_batch"][-1])
    except RunFolderError:
        return None


# The analysis


def analyse(config: AnalysisConfig) -> Path:
    """Run the analysis and return the folder of its results; ConfigError: model, data or sizes do not fit."""
    try:
        devices, warnings = resolve_devices(None if config.device is None else [config.device])
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"device: {error}") from None
    _warn(warnings)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    training, model_folder = resolve_model(config)
    data, working = _load(config, training, devices[0])
    examples = getattr(data, config.part)
    name = "untrained" if model_folder is None else str(model_folder)
    if model_folder is None and is_pretrained(training.model_config):
        name = training.model_config["name"]
    generator = np.random.default_rng(config.seed)
    indices = np.sort(generator.permutation(len(examples))[: config.sample_size])
    count = len(indices)
    print(
        f"{training.model_type} with {working.parameter_count:,} parameters ({name}) on {count} {config.part} examples "
        f"of {data.source}, {devices[0]}"
    )

    gradients = Gradients(working, examples, indices, config.micro_batch)
    gradients.compute_full()
    if not (np.isfinite(gradients.loss) and np.isfinite(gradients.squared_norm)):
        raise ConfigError(f"model: its loss on these examples, or the gradient, is NaN or infinite ({name})")
    statistics = gradients.example_statistics()
    drawn = draw_batches(indices, config.batch_size, generator)
    batches = [gradients.of_batch(batch) for batch in progress_bar(drawn, desc="batches", unit=" batches")]
    deviations = np.array([batch.deviation for batch in batches])
    eta = training.ETA if model_folder is None or training.ETA_at_end is None else training.ETA_at_end
    parameters = {"eta": eta, "vartheta": training.vartheta, "nu": training.nu}
    requested = requests(statistics, config.batch_size, parameters)

    own_test = training.sampling_method
    if training.debias and own_test != "none":
        own_test += ", debias"
    last = None if model_folder is None else last_request(model_folder)

    summary = {
        "model": name,
        "model_type": training.model_type,
        "parameters": working.parameter_count,
        "data_source": data.source,
        "part": config.part,
        "sample": count,
        "loss": gradients.loss,
        "full_gradient_norm": gradients.squared_norm**0.5,
        "variance": statistics.variance,
        "inner_product_variance": statistics.inner_product_variance,
        "noise_scale": statistics.variance / statistics.squared_norm if statistics.squared_norm > 0 else None,
        "noise_scale_error": gradients.noise_scale_error if statistics.squared_norm > 0 else None,
        "batch_size": config.batch_size,
        "test": own_test,
        "request_of_run": last,
        "deviation": {"mean": deviations.mean(), "standard_deviation": deviations.std()},
        "config": dataclasses.asdict(config),
    }
    batch_rows = [(number, batch.deviation, batch.norm, batch.cosine) for number, batch in enumerate(batches)]
    tables = {
        "batches": [("batch", "deviation", "norm", "cosine"), *batch_rows],
        "requests": [("test", "factor", "parameter", "request"), *requested],
    }
    output = Path(config.output_dir)
    try:
        figure = deviations_figure(batches, config.batch_size)
        write_atomically(output / "deviations.png", lambda path: figure.savefig(path, dpi=110))
        for name, rows in tables.items():
            write_atomically(output / f"{name}.csv", lambda path, rows=rows: _write_rows(path, rows))
        write_json_atomically(output / ANALYSIS_SUMMARY, summary)
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write {error.filename or output}: {error.strerror}") from None
    _print_findings(summary)
    _print_requests(requested, config.batch_size, own_test, last)
    print(f"results: {output}")
    return output


def _print_requests(
    requested: Sequence[tuple[str, float, float, int]], batch: int, own_test: str, last: int | None
) -> None:
    """Print the requests at the configuration's own parameters, mark its own test, and print the run's own request."""
    symbols = {
        "norm_test": "eta",
        "norm_test, debias": "eta",
        "inner_product_test, debias": "vartheta",
        "orthogonality, debias": "nu",
    }
    print(f"requests for this sample and a batch of {batch}, with the parameters of the configuration:")
    for test, factor, value, request in requested:
        if factor == 1.0:
            mark = ", the test of the configuration" if test == own_test else ""
            print(f"  {test}, {symbols[test]} {value:g}: {counted(request, 'example')}{mark}")
    if own_test == "none":
        print("the configuration has no batch test (sampling_method: none): its batch is fixed")
    elif own_test not in symbols:
        of_run = "" if last is None else f"; the run itself requests {last:,} at its end"
        print(f"the test of the configuration, {own_test}, is not among them{of_run}")
    elif last is not None:
        print(f"the run itself requests {last:,} at its end: docs/gradient_analysis.md says why the two differ")


def deviations_figure(batches: Sequence[BatchGradient], batch_size: int) -> Figure:
    """Draw a histogram of deviations, and one of cosines."""
    figure, (left, right) = make_figure(2)
    values = np.array([batch.deviation for batch in batches])
    left.hist(values, bins="auto", color=colour(0), alpha=0.6)
    left.axvline(values.mean(), color="black", lw=1, label=f"mean {values.mean():.4g}")
    left.set_title(f"Deviation from the full gradient, batches of {batch_size}")
    left.set_xlabel("||g_B - F||")
    left.set_ylabel("batches")
    cosines = np.array([batch.cosine for batch in batches])
    cosines = cosines[np.isfinite(cosines)]
    if len(cosines):
        right.hist(cosines, bins="auto", color=colour(4), alpha=0.6)
    right.set_title("Cosine to the full gradient")
    right.set_xlabel("cos(g_B, F)")
    right.set_ylabel("batches")
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
    left.legend(fontsize=8)
    return figure


def _write_rows(path: Path, rows: Iterable[Sequence]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _print_findings(summary: dict[str, Any]) -> None:
    print("loss {loss:.4f}, ||F|| {full_gradient_norm:.4g}, V {variance:.4g}".format(**summary))
    scale = summary["noise_scale"]
    if scale is None:
        print("noise scale: not measurable, the gradient of this sample is no larger than its noise")
    else:
        error = f"standard error {summary['noise_scale_error']:,.3g}"
        print(f"noise scale V / (||F||^2 - V / {summary['sample']}): {scale:,.4g} examples ({error})")
        print("  (V / ||F||^2 would be biased: it is too small, and depends on the size of the sample)")


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 done, 2 wrong configuration (nothing is written)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0].rstrip(":"))
    parser.add_argument(
        "--config",
        type=Path,
        default=HERE / "config_analyze_gradient.yaml",
        help="default: config_analyze_gradient.yaml in the folder of this script",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = parse_analysis_config(options.config, options.overrides)
        analyse(config)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if not shows_progress():
        disable_progress_bar()  # of transformers, while it loads the model
    torch.manual_seed(0)
    sys.exit(main())
