"""Train a run: `python run.py` on the command line, `train(...)` in scripts and notebooks."""

import argparse
import contextlib
import gc
import io
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# These imports are fast. PyTorch, and what needs it, is imported in functions, after the first line on the screen.
from fabrics.listing import KINDS, listing
from fabrics.planning import command as planning
from utils.distributed.launch import Launch, is_main, start_processes, started_by_others, threads_per_process
from utils.distributed.signals import STATUS_INTERRUPTED, StopRequest, handled_signals
from utils.files import CHECKPOINTS_FOLDER, MODELS_FOLDER, REPORT_FOLDER, given_config, has_checkpoint

if TYPE_CHECKING:
    from logging.handlers import MemoryHandler

    import numpy as np

    from cluster import Cluster
    from training_logs.recording.records import Observer
    from utils.config.schema import Config
    from utils.distributed.processes import Processes

# From Python


@dataclass(frozen=True)
class Run:
    """A finished or interrupted run.

    Attributes:
        summary: summary.json; its status is completed or interrupted.
        training_log: training_log.csv, a structured array with one row per round and trainer.
        model_folder: the best model, which transformers loads; None if the run was interrupted or could not write it.
    """

    folder: Path
    summary: dict
    training_log: "np.ndarray"
    model_folder: Path | None

    @property
    def perplexity(self) -> float | None:
        """The final perplexity of the best model; None for a classifier."""
        return self.summary["final_metric"] if self.summary["metric"] == "perplexity" else None

    @property
    def accuracy(self) -> float | None:
        """The final accuracy of the best model, 0 to 1; None for a language model."""
        return self.summary["final_metric"] if self.summary["metric"] == "accuracy" else None


def train(
    config: "str | Path | Mapping | Config | None" = None,
    *,
    resume: str | Path | None = None,
    force: bool = False,
    **overrides: Any,
) -> Run:
    """Train in this process what `python run.py` trains, with the same bits; nothing global stays changed.

    Args:
        config: a file, a mapping of its keys, or a Config; None: config.yaml, or the run folder's if it is resumed.
        resume: as --resume.
        force: as --force.
        overrides: values that replace those of the configuration.

    Raises:
        ConfigError: the configuration is wrong, and nothing was trained.
        CheckpointError: the run cannot be resumed.
        TrainingError: training stopped with an error. What was trained so far is in the run folder.
    """
    from training_logs.showing.run_data import read_table
    from utils.config.schema import ConfigError, plain

    if started_by_others():
        raise ConfigError("processes: train() is a single process; torchrun starts run.py")
    started = time.perf_counter()
    words = [f"{key}={json.dumps(plain(value), default=str, ensure_ascii=False)}" for key, value in overrides.items()]
    options = argparse.Namespace(config=config, overrides=words, resume=resume and str(resume), force=force)
    with _unchanged_program(), prepared_run(options, started) as (cluster, recorder, folder):
        _, error = train_and_record(cluster, recorder, folder)
    if error is not None:
        raise error
    summary = json.loads((folder / REPORT_FOLDER / "summary.json").read_text(encoding="utf-8"))
    best = summary.get("best_model")
    return Run(folder, summary, read_table(folder / REPORT_FOLDER / "training_log.csv"), best and folder / best)


@contextlib.contextmanager
def _unchanged_program() -> Iterator[None]:
    """Restore, at the end, what a run sets for the whole program."""
    import torch
    from transformers.utils import logging as transformers_logging

    from training_logs.recording.run_folder import logger

    with contextlib.ExitStack() as restored:
        restored.callback(os.environ.update, dict(os.environ))
        restored.callback(os.environ.clear)
        for number in handled_signals():
            restored.callback(signal.signal, number, signal.getsignal(number))
        restored.callback(torch.set_num_threads, torch.get_num_threads())
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        deterministic = torch.are_deterministic_algorithms_enabled()
        restored.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        fills = torch.utils.deterministic.fill_uninitialized_memory
        restored.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fills)
        restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        restored.callback(logger.setLevel, logger.level)
        restored.callback(setattr, logger, "propagate", logger.propagate)
        restored.callback(setattr, logger, "handlers", logger.handlers)
        logger.handlers = []  # otherwise the start of the log closes them
        if transformers_logging.is_progress_bar_enabled():
            restored.callback(transformers_logging.enable_progress_bar)
        if isinstance(sys.stdout, io.TextIOWrapper):
            restored.callback(sys.stdout.reconfigure, errors=sys.stdout.errors)
        yield


# From the command line


def open_standard_streams() -> None:
    """Give closed standard streams the null device, so that no file of the run takes their descriptors."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, os.fdopen(descriptor, mode))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="python run.py [options] [key=value ...]",
        description="Train language models with little communication (AdLoCo).",
        epilog="examples:\n"
        "  python run.py                                       train with config.yaml\n"
        "  python run.py ETA=0.5 model_config.hidden_size=128  change two of its values\n"
        "  python run.py --resume logs/<run>                   resume an interrupted run\n"
        "  torchrun --nnodes=2 --nproc_per_node=8 run.py       two machines of 8 GPUs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    parser.add_argument("--config", metavar="FILE", help="the configuration (default: config.yaml)")
    parser.add_argument(
        "--resume",
        metavar="RUN_DIR",
        help="continue the run in this folder; auto: continue, or begin, log_dir/run_name",
    )
    parser.add_argument("--force", action="store_true", help="with --resume: allow values that change the training")
    parser.add_argument("--list", choices=KINDS, help="print the known names, one per line, and exit")
    planning.add_options(parser)
    options = parser.parse_intermixed_args(arguments)
    for name in ("config", "resume"):
        if getattr(options, name) == "":  # of a shell variable without a value
            parser.error(f"--{name} must not be empty")
    if options.resume not in (None, "auto") and options.config:
        parser.error("--resume takes the configuration from the run folder; give --config or --resume")
    if options.force and not options.resume:
        parser.error("--force needs --resume")
    if options.plan and options.resume:
        parser.error("--plan is for new runs; give --plan or --resume")
    planning.check_options(parser, options)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Start the processes of the run, be one of them, and return the exit status.

    0: completed. 1: training stopped with an error, or models cannot be written. 2: the configuration is wrong, and
    nothing was trained. 130: interrupted. Except for 2, what was trained so far is in the run folder; after an error of
    several processes, up to the last checkpoint.
    """
    started = time.perf_counter()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    if is_main() and not (options.plan or options.list):
        with contextlib.suppress(OSError):  # a full disk under standard output does not end a run
            print("AdLoCo: loading PyTorch ...", flush=True)
    from utils.config.resume import folder_to_resume
    from utils.config.schema import ConfigError
    from utils.distributed.peers import PeerLostError

    try:
        if options.list:
            import_named_plugins(options)
            print("\n".join(listing(options.list)))
            return 0
        if options.plan:
            planning.print_plan(options)
            return 0
        others = contextlib.nullcontext()
        if not started_by_others():
            config = given_config(options.config)
            with contextlib.suppress(ConfigError):  # reported when all processes read it
                resumed = folder_to_resume(options.resume, options.config, options.overrides)
                if resumed and options.config is None:
                    config = Path(resumed, "config.yaml")
            program = ["-m", f"{__package__}.run"] if __package__ else [__file__]  # installed, or a checkout
            others = start_processes(Path(config), options.overrides, [*program, *arguments])
        with others as launch:
            with fast_imports():  # while the other processes do the same
                import cluster
            with prepared_run(options, started, launch) as (cluster, recorder, folder):
                status, _ = train_and_record(cluster, recorder, folder)
            if status and launch is not None:
                launch.kill()
            return status
    except (ConfigError, PeerLostError) as error:
        if is_main():
            for problem in getattr(error, "problems", [str(error)]):
                print(f"error: {problem}", file=sys.stderr)
        return 1 if isinstance(error, PeerLostError) else 2


@contextlib.contextmanager
def fast_imports() -> Iterator[None]:
    """Import PyTorch and transformers in two thirds of the time.

    Collecting garbage takes a quarter. transformers would import scikit-learn, for a function that no run uses.
    """
    gc.disable()
    hidden = {"sklearn": None} if "sklearn" not in sys.modules else {}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        gc.enable()


# A run


@contextlib.contextmanager
def prepared_run(
    options: argparse.Namespace, started: float, launch: Launch | None = None
) -> Iterator[tuple["Cluster", "Observer", Path]]:
    """Connect this process to the others, read the configuration, lock the run folder, and set up."""
    from training_logs.recording.run_folder import lock_run_in_main, start_logging
    from utils.config.resume import folder_to_resume
    from utils.config.schema import ConfigError
    from utils.distributed.peers import WRONG_CONFIG, PeerLostError
    from utils.distributed.processes import agree_on_config, decided, done_by_all, meet, place_nodes

    early_log = start_logging(is_main())
    processes = meet(launch)
    with contextlib.ExitStack() as locks:
        try:
            resumed = decided(processes, lambda: folder_to_resume(options.resume, options.config, options.overrides))
            config, warnings = done_by_all(processes, lambda: read_config(options, resumed))
            locks.enter_context(lock_run_in_main(processes, resumed))
            agree_on_config(processes, config)
            warnings += place_nodes(processes, config)
            cluster, recorder, folder = set_up(config, processes, resumed, locks, early_log, started)
        except (ConfigError, PeerLostError) as error:
            processes.failed(f"{WRONG_CONFIG if isinstance(error, ConfigError) else ''}{error}")
            raise
        for warning in warnings:
            recorder.warn(warning)
        yield cluster, recorder, folder


def import_named_plugins(options: argparse.Namespace) -> None:
    """Import the plugins of the configuration; ConfigError: it is wrong."""
    from fabrics.config_checks import CHECKS
    from utils.config.reading import load_config

    load_config(given_config(options.config), options.overrides, CHECKS)


def read_config(options: argparse.Namespace, resumed: str | None) -> tuple["Config", list[str]]:
    from fabrics.config_checks import CHECKS
    from training_logs.recording.run_folder import check_logs
    from utils.config.reading import load_config
    from utils.config.resume import resumed_config

    if resumed:
        return resumed_config(Path(resumed), options.overrides, options.force, CHECKS, options.config)
    config, warnings = load_config(given_config(options.config), options.overrides, CHECKS)
    check_logs(config, anew=options.resume is None)
    return config, warnings


def set_up(
    config: "Config",
    processes: "Processes",
    resumed: str | None,
    locks: contextlib.ExitStack,
    early_log: "MemoryHandler",
    started: float,
) -> tuple["Cluster", "Observer", Path]:
    """Load the data and build the cluster, from the last checkpoint if the run is resumed."""
    import torch

    from cluster import Cluster
    from fabrics.data.dataset_loader import load_data
    from fabrics.models.initialisation import check_architecture
    from fabrics.planning.memory_choice import resources_of, with_chosen_memory
    from fabrics.pool.device_errors import explain_setup_errors
    from fabrics.pool.run_checks import check_nodes
    from training_logs.recording.provenance import Origin, code_of, machine
    from training_logs.recording.recorder import RunRecorder
    from training_logs.recording.records import Observer
    from training_logs.recording.run_folder import lock_run_in_main, logger, make_run_folder
    from utils.checkpoint.checkpoint import newest_checkpoint
    from utils.config.plugins import import_plugins
    from utils.config.resume import changes_since
    from utils.config.schema import ConfigError
    from utils.distributed.processes import decided, done_by_all

    check_nodes(config, processes.devices)
    if config.memory == "auto":
        on_gpus = processes.devices[0].type == "cuda"
        config, choice = with_chosen_memory(config, resources_of(config, processes), on_gpus)
        if processes.is_main:
            logger.info(choice)
    code = code_of() if processes.is_main else None  # before the data, which may take long, as files may change
    checkpoint = newest_checkpoint(Path(resumed, CHECKPOINTS_FOLDER), processes) if resumed else None
    changes = done_by_all(processes, lambda: changes_since(checkpoint.folder, config) if checkpoint else [])
    threads = threads_per_process(config)
    method = None
    if checkpoint is not None:
        with checkpoint.of_this_version():
            method = checkpoint.state["cluster"]["method"]
            if config.cpu_threads is None:
                threads = max(1, int(checkpoint.state["cluster"]["threads"]))
    torch.set_num_threads(threads)
    done_by_all(processes, lambda: check_architecture(config) if processes.is_main else None)
    data = load_data(config, processes)
    with explain_setup_errors():
        cluster = Cluster(config, data, processes, method)
        if checkpoint is not None:
            cluster.resume(checkpoint)
            cluster.warnings += changes
    folder = Path(resumed) if resumed else decided(processes, lambda: make_run_folder(config, data.dataset))
    if not resumed:
        locks.enter_context(lock_run_in_main(processes, folder))
    machines = processes.gather(machine(cluster.model.device))

    def recorder() -> Observer:
        if not processes.is_main:
            return Observer()
        origin = Origin.of_this_program(started, code, machines, import_plugins(config.plugins))
        try:
            if checkpoint is None:
                return RunRecorder(config, folder, early_log, started, None, origin)
            with checkpoint.of_this_version():
                return RunRecorder(config, folder, early_log, started, checkpoint.state["observer"], origin)
        except OSError as error:
            raise ConfigError(f"the run folder cannot be used: {error}") from None

    return cluster, done_by_all(processes, recorder), folder


def say_how_to_resume(folder: Path) -> None:
    from training_logs.recording.run_folder import logger

    if has_checkpoint(folder):
        logger.info("to resume: python run.py --resume %s", shlex.quote(str(folder)))


def finish_for_main_thread(cluster: "Cluster", recorder: "Observer", folder: Path, reason: str) -> None:
    """Report the end of a run whose main thread waits for a lost process, or in a long round."""
    from training_logs.recording.run_folder import logger
    from utils.distributed.signals import STOPPED_IN_ROUND

    stopped = reason.endswith(STOPPED_IN_ROUND)
    if stopped:
        logger.warning("%s", reason)
    else:
        logger.error("error: %s", reason)
    say_how_to_resume(folder)  # first, as there is little time
    recorder.finish(cluster, {}, "interrupted" if stopped else "failed", {}, None if stopped else reason)
    recorder.close()


def train_and_record(cluster: "Cluster", recorder: "Observer", folder: Path) -> tuple[int, BaseException | None]:
    """Train, evaluate, save and report; return the exit status, and the error that ended the training."""
    from fabrics.pool.device_errors import DeviceLostError
    from fabrics.training.worker import TrainingError
    from training_logs.recording.run_folder import logger
    from utils.distributed.peers import PeerLostError
    from utils.distributed.signals import StoppedInRoundError

    processes = cluster.processes
    models_folder = folder / MODELS_FOLDER
    evaluations = {}
    models = None
    status = "failed"
    code = 1
    # torchrun would kill the main process if another one exited with an error.
    interrupted = STATUS_INTERRUPTED if processes.is_main else 0
    ended_by = None
    reason = None

    if processes.is_main:
        processes.finish_by(partial(finish_for_main_thread, cluster, recorder, folder))
    try:
        with StopRequest(speaks=processes.is_main) as stop:
            processes.stalls.signalled = stop.arrived
            evaluations = cluster.train(recorder, folder, stop)
            models = cluster.save_models(models_folder, recorder)
        if cluster.interrupted:
            status = "interrupted"
            code = interrupted
        else:
            status = "completed"
            code = 0 if models else 1
        processes.close()
    except StoppedInRoundError as error:
        if processes.is_main:
            logger.warning("%s", error)
        reason = str(error)
        status = "interrupted"
        code = interrupted
    except (TrainingError, PeerLostError) as error:
        if processes.is_main:
            logger.error("error: %s", error)
        reason = str(error)
        ended_by = error
    except KeyboardInterrupt as error:
        reason = "it was interrupted"
        status = "interrupted"
        code = STATUS_INTERRUPTED
        ended_by = error
    except Exception as error:  # a bug: the log gets the traceback, and the user keeps what was trained
        logger.exception("training failed")
        reason = f"{type(error).__name__}: {error}"
        ended_by = error
    if reason is not None:
        processes.failed(reason)
    if processes.is_main:
        # After an error the other processes do not save their parts, and a lost device cannot be read.
        if models is None and processes.count == 1 and not isinstance(ended_by, DeviceLostError):
            try:
                models = cluster.save_models(models_folder, recorder)
            except Exception:  # the summary, the cause and the command to resume still follow
                logger.exception("the models cannot be saved")
        ends = evaluations if status == "completed" else {}
        recorder.finish(cluster, ends, status, models or {}, reason if status == "failed" else None)
        if code:
            say_how_to_resume(folder)
        recorder.close()
    return code, ended_by


def start() -> int:
    open_standard_streams()
    try:
        status = main()
    except BrokenPipeError:  # the reader, such as head, has ended before --plan or --list
        status = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = STATUS_INTERRUPTED
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more at its end, and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(start())
