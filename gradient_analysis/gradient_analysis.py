"""How the gradients of batches scatter around the full gradient:

    python gradient_analysis/gradient_analysis.py [--config PATH] [key=value ...]

computes the full gradient of a model over a sample, exactly; the deviation of every batch from it; the variance of
single examples, and its share by layer; the law of the deviation in the batch size; and what every batch test would
request at this point. Numbers go to CSV and JSON, pictures to PNG.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import yaml
from matplotlib.figure import Figure
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from algorithms.batch.per_example import UnsupportedModuleError
from fabrics.config_checks import CHECKS, CHOICES
from fabrics.data.dataset_loader import load_data
from fabrics.models.registry import build_model
from fabrics.training.flat_model import FlatModel
from gradient_analysis.figures import deviations_figure, law_figure, layers_figure, requests_figure
from gradient_analysis.gradients import Gradients
from gradient_analysis.laws import (
    distribution,
    draw_batches,
    finite_population_factor,
    power_law,
    requests,
    root_mean_square,
)
from training_logs.log_processor import ANALYSIS_SUMMARY
from training_logs.showing.run_data import RunFolderError, read_run
from training_logs.trackers.clearml import resolved_mode, send_folder
from utils.config.reading import check_plugins_of_run, load_config
from utils.config.schema import Config, ConfigError
from utils.config.yaml_reading import read_mapping, yaml_value
from utils.distributed.devices import resolve_devices
from utils.utils import write_atomically, write_json_atomically

PositiveInt = Annotated[int, Field(gt=0)]
Grid = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AnalysisConfig:
    """The keys of config_analyze_gradient.yaml, which explains them."""

    model: str | None = None
    config: str | None = "config.yaml"
    part: Literal["train", "validation"] = "train"
    sample_size: Annotated[int, Field(ge=2)] | None = 512
    replacement: bool = False
    batch_size: PositiveInt = 8
    batch_sizes: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    batches_per_size: PositiveInt = 32
    micro_batch: PositiveInt = 16
    seed: Annotated[int, Field(ge=0)] = 42
    device: str | None = None
    output_dir: str = "gradient_plots"
    clearml: Annotated[
        Literal["auto", "online", "offline", "off"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = "off"
    eta: Grid = dataclasses.field(default_factory=lambda: [0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    theta: Grid = dataclasses.field(default_factory=lambda: [0.1, 0.3, 0.9, 2.7])
    nu: Grid = dataclasses.field(default_factory=lambda: [0.3, 1.0, 5.84, 20.0])


def parse_analysis_config(path: Path, overrides: Sequence[str]) -> AnalysisConfig:
    """Read the file and `key=value` overrides.

    Raises:
        ConfigError: with one line per problem.
    """
    values = read_mapping(path)
    try:
        for assignment in overrides:
            key, separator, text = assignment.partition("=")
            if not separator:
                raise ConfigError(f"{assignment}: an override must have the form key=value")
            values[key] = yaml_value(text)
        return TypeAdapter(AnalysisConfig).validate_python(values)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: value is not valid YAML: {text}") from None
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            place = ".".join(str(part) for part in problem["loc"][:1])
            problems.append(f"{place}: {problem['msg'].removeprefix('Input ')}, got {problem['input']!r}")
        raise ConfigError(problems) from None


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _run_of(model: Path) -> Path | None:
    """The run folder that a model folder is in."""
    return next((folder for folder in [model, *model.parents] if (folder / "config.yaml").is_file()), None)


def resolve_model(config: AnalysisConfig) -> tuple[Config, Path | None]:
    """The training configuration, and the folder of the model; None for an untrained one.

    Raises:
        ConfigError: there is no such model, or no configuration for it.
    """
    model = None if config.model is None else Path(config.model)
    path = None if config.config is None else Path(config.config)
    if model is not None:
        if not model.is_dir():
            raise ConfigError(f"model: no such folder: {model}")
        run = _run_of(model.resolve())
        if not (model / "config.json").is_file():
            try:
                best = read_run(model).summary.get("best_model")
            except RunFolderError as error:
                raise ConfigError(f"model: neither a model folder nor a run folder: {error}") from None
            if best is None:
                raise ConfigError(f"model: {model} has no final model; name a folder in it")
            model = model / best
        if run is not None:
            path = run / "config.yaml"
            check_plugins_of_run(run)
    if path is None:
        raise ConfigError("config: null needs a model that lies in the folder of a run")
    training, warnings = load_config(path, (), CHOICES, CHECKS)
    _warn(f"{path}: {warning}" for warning in warnings)
    if model is not None:
        values = {"name": str(model), "pretrained": True}
        training = dataclasses.replace(training, model_config=values, need_to_reinit_output_layers=False)
    return training, model


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])

    write_atomically(path, write)


def analyse(config: AnalysisConfig) -> Path:
    """Do everything that the configuration asks for; the folder of the results.

    Raises:
        ConfigError: model, data or sizes do not fit.
    """
    try:
        devices, warnings = resolve_devices(None if config.device is None else [config.device])
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"device: {error}") from None
    _warn(warnings)
    training, model_folder = resolve_model(config)
    output = Path(config.output_dir)
    # A sample is of all data, whoever had them.
    data = load_data(dataclasses.replace(training, data_split="iid", data_split_over="trainers"))
    examples = data.train if config.part == "train" else data.validation
    count = len(examples) if config.sample_size is None else config.sample_size
    sizes = config.batch_sizes or [2**power for power in range(count.bit_length()) if 2**power <= count]
    if count > len(examples):
        raise ConfigError(f"sample_size: the {config.part} part has {len(examples)} examples, got {count}")
    for key, size in (("batch_size", config.batch_size), ("batch_sizes", max(sizes))):
        if size > count:
            raise ConfigError(f"{key}: must be at most the {count} examples of the sample, got {size}")
    try:
        module = build_model(
            training.model_type,
            training.model_config,
            data.tokenizer,
            training.sequence_length,
            training.training_seed,
            data.class_names,
        )
        working = FlatModel(module, devices[0])
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"model: {error}") from None
    generator = np.random.default_rng(config.seed)
    indices = np.sort(generator.permutation(len(examples))[:count])
    gradients = Gradients(working, examples, indices, config.micro_batch)
    name = "untrained" if model_folder is None else str(model_folder)
    print(
        f"{training.model_type} with {working.parameter_count:,} parameters ({name}) on {count} {config.part} examples "
        f"of {data.source}, {devices[0]}"
    )
    gradients.compute_full()
    singles = gradients.of_examples()
    statistics = singles.statistics
    drawn = draw_batches(indices, config.batch_size, None, config.replacement, generator)
    batches = gradients.of_batches(drawn, f"batches of {config.batch_size}")
    found = distribution([batch.deviation for batch in batches])
    measured = []
    for size in sizes:
        # Where the sample fills fewer, a few permutations of it.
        wanted = min(config.batches_per_size, max(4, count // size))
        several = draw_batches(indices, size, wanted, config.replacement, generator)
        measured.append(root_mean_square([b.deviation for b in gradients.of_batches(several, f"batches of {size}")]))
    factors = [finite_population_factor(count, size, config.replacement) for size in sizes]
    predicted = [(statistics.variance / size * factor) ** 0.5 for size, factor in zip(sizes, factors, strict=True)]
    # Where a batch is a large part of the sample its deviation shrinks for that alone.
    usable = [(s, m / f**0.5) for s, m, f in zip(sizes, measured, factors, strict=True) if f > 0]
    law = power_law(*zip(*usable, strict=True)) if usable else None
    asked = requests(statistics, config.batch_size, {"eta": config.eta, "theta": config.theta, "nu": config.nu})
    sampling = f"{'with' if config.replacement else 'without'} replacement"
    summary = {
        "model": name,
        "model_type": training.model_type,
        "parameters": working.parameter_count,
        "data_source": data.source,
        "part": config.part,
        "sample": count,
        "sampling": sampling,
        "loss": gradients.loss,
        "full_gradient_norm": statistics.squared_norm**0.5,
        "per_example": dataclasses.asdict(statistics),
        "noise_scale": statistics.variance / statistics.squared_norm if statistics.squared_norm else None,
        "batch_size": config.batch_size,
        "deviation": dataclasses.asdict(found),
        "batch_size_law": None if law is None else dataclasses.asdict(law) | {"independent_examples": -0.5},
        "config": dataclasses.asdict(config),
    }
    figures: dict[str, Figure] = {
        "deviations": deviations_figure(batches, found, config.batch_size),
        "batch_size_law": law_figure(sizes, measured, predicted, law, sampling),
        "layers": layers_figure(singles.variance_by_layer),
        "requests": requests_figure(asked, count),
    }
    try:
        for name, figure in figures.items():
            write_atomically(output / f"{name}.png", lambda path, figure=figure: figure.savefig(path, dpi=110))
        rows = [
            (number, batch.deviation, batch.norm, batch.cosine, " ".join(map(str, chosen)))
            for number, (batch, chosen) in enumerate(zip(batches, drawn, strict=True))
        ]
        _write_csv(output / "batches.csv", ("batch", "deviation", "norm", "cosine", "examples"), rows)
        law_rows = list(zip(sizes, measured, predicted, strict=True))
        _write_csv(output / "batch_size_law.csv", ("batch_size", "deviation", "predicted"), law_rows)
        _write_csv(output / "layers.csv", ("parameter", "variance"), list(singles.variance_by_layer.items()))
        _write_csv(output / "requests.csv", ("test", "parameter", "request"), asked)
        example_rows = list(zip(indices, singles.squared_norms, singles.inner_products, strict=True))
        _write_csv(output / "examples.csv", ("example", "squared_norm", "inner_product"), example_rows)
        write_json_atomically(output / ANALYSIS_SUMMARY, summary)
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write {error.filename or output}: {error.strerror}") from None
    print(
        f"loss {gradients.loss:.4f}, ||F|| {statistics.squared_norm**0.5:.4g}, V {statistics.variance:.4g}, "
        f"V / ||F||^2 {summary['noise_scale'] or float('nan'):.4g} examples"
    )
    print(
        f"deviation of batches of {config.batch_size} ({sampling}): mean {found.mean:.4g}, median {found.median:.4g}, "
        f"excess kurtosis {found.excess_kurtosis:.3g}"
    )
    if law is not None:
        print(f"deviation ~ batch ^ {law.exponent:.3f} +- {law.error:.3f} (independent examples: -0.5)")
    print(f"results: {output}")
    return output


def main(arguments: list[str] | None = None) -> int:
    """0: done; 2: bad configuration, nothing done."""
    default = Path(__file__).resolve().parent / "config_analyze_gradient.yaml"
    parser = argparse.ArgumentParser(description="How gradients of batches scatter around the full gradient.")
    parser.add_argument(
        "--config", type=Path, default=default, help="default: config_analyze_gradient.yaml beside this"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = parse_analysis_config(options.config, options.overrides)
        mode = resolved_mode(config.clearml)
        output = analyse(config)
    except (ConfigError, UnsupportedModuleError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    if mode != "off":
        warning = send_folder(output, mode)
        if warning is None:
            print(f"ClearML: {mode}")
        else:
            _warn([warning])
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
