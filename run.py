"""AdLoCo from the command line: python run.py [--config PATH | --resume RUN_DIR | --plan] [key=value ...]."""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# These imports are fast. PyTorch, and what needs it, is imported in functions, after the first line on the screen.
from fabrics.planning import command as planning
from utils.distributed.launch import Launch, is_main, start_processes, started_by_others, threads_per_process
from utils.distributed.signals import STATUS_INTERRUPTED, StopRequest
from utils.run_layout import CHECKPOINTS_FOLDER, MODELS_FOLDER, has_checkpoint

if TYPE_CHECKING:
    from logging.handlers import MemoryHandler

    from cluster import Cluster
    from training_logs.recording.records import Observer
    from utils.checkpoint.checkpoint import Checkpoint
    from utils.config.schema import Config
    from utils.distributed.processes import Processes


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
        description="Train language models with little communication (AdLoCo).",
        epilog="Every configuration key can be given as key=value, nested keys with dots: "
        "python run.py ETA=0.5 model_config.hidden_size=128. torchrun may start the processes; otherwise the key "
        "processes sets their number.",
    )
    parser.add_argument("--config", help="configuration file (default: config.yaml)")
    parser.add_argument(
        "--resume",
        metavar="RUN_DIR",
        help="resume the run in this folder from its last checkpoint; auto: resume the run log_dir/run_name if it has "
        "one, otherwise begin it",
    )
    parser.add_argument("--force", action="store_true", help="with --resume: allow overrides that change the training")
    planning.add_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
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

    0: completed. 1: training stopped with an error. 2: the configuration is wrong, and nothing was done.
    130: interrupted. Except for 2, what was trained so far is in the run folder.
    """
    started = time.perf_counter()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    if is_main() and not options.plan:
        with contextlib.suppress(OSError):  # a full disk under standard output does not end a run
            print("AdLoCo: loading PyTorch ...", flush=True)
    from utils.config.schema import ConfigError

    try:
        if options.plan:
            planning.print_plan(options)
            return 0
        if started_by_others():
            return run(options, started, None)
        config = Path(options.config or "config.yaml")
        if options.resume not in (None, "auto"):
            config = Path(options.resume, "config.yaml")
        others = start_processes(config, options.overrides, [__file__, *arguments])
    except ConfigError as error:
        return print_error(error)
    with others as launch:
        status = run(options, started, launch)
        if status and launch is not None:
            launch.kill()
        return status


def run(options: argparse.Namespace, started: float, launch: Launch | None) -> int:
    """Run one process: connect to the others, set up, train; return the exit status."""
    from training_logs.recording.run_folder import start_logging
    from utils.checkpoint.checkpoint import CheckpointError
    from utils.checkpoint.run_lock import lock_run_in_main
    from utils.config.resume import folder_to_resume
    from utils.config.schema import ConfigError
    from utils.distributed.collective_checks import agree_on_config, decided, done_by_all
    from utils.distributed.peers import PeerLostError
    from utils.distributed.processes import meet, place_nodes

    early_log = start_logging(is_main())
    try:
        processes = meet(launch)
    except PeerLostError as error:
        return print_error(error)
    with contextlib.ExitStack() as locks:
        try:
            resumed = decided(processes, lambda: folder_to_resume(options.resume, options.config, options.overrides))
            config, warnings = done_by_all(processes, lambda: read_config(options, resumed))
            locks.enter_context(lock_run_in_main(processes, resumed))
            agree_on_config(processes, config)
            warnings += place_nodes(processes, config)
            cluster, recorder, folder = set_up(config, processes, resumed, early_log, started)
            if not resumed:
                locks.enter_context(lock_run_in_main(processes, folder))
        except (ConfigError, CheckpointError, PeerLostError) as error:
            processes.failed(str(error))
            return print_error(error)
        for warning in warnings:
            recorder.warn(warning)
        return train(cluster, recorder, folder)


def read_config(options: argparse.Namespace, resumed: str | None) -> tuple["Config", list[str]]:
    """Return the checked configuration of the run, and warnings."""
    from fabrics.config_checks import CHECKS
    from training_logs.recording.run_folder import check_logs
    from utils.config.reading import load_config
    from utils.config.resume import resumed_config

    if resumed:
        return resumed_config(Path(resumed), options.overrides, options.force, CHECKS)
    config, warnings = load_config(options.config or "config.yaml", options.overrides, CHECKS)
    check_logs(config, anew=options.resume is None)
    return config, warnings


def print_error(error: Exception) -> int:
    """Print why nothing was trained, and return the exit status: 2 for a wrong configuration, 1 for a lost process."""
    if is_main():
        for problem in getattr(error, "problems", [str(error)]):
            print(f"error: {problem}", file=sys.stderr)
    return 2 if isinstance(error, ValueError) else 1


def set_up(
    config: "Config", processes: "Processes", resumed: str | None, early_log: "MemoryHandler", started: float
) -> tuple["Cluster", "Observer", Path]:
    """Load the data and build the cluster, from the last checkpoint if the run is resumed.

    Returns:
        The cluster, the observer that records the run, and the run folder.
    """
    import torch

    from cluster import Cluster
    from fabrics.data.dataset_loader import load_data
    from fabrics.pool.device_errors import explain_setup_errors
    from fabrics.pool.run_checks import check_nodes
    from training_logs.recording.provenance import code_of, machine
    from training_logs.recording.run_folder import make_run_folder
    from utils.checkpoint.checkpoint import newest_checkpoint
    from utils.distributed.collective_checks import decided, done_by_all

    check_nodes(config, processes.devices)
    code = code_of() if processes.is_main else None  # before the data, which may take long, as files may change
    checkpoint = newest_checkpoint(Path(resumed, CHECKPOINTS_FOLDER), processes) if resumed else None
    threads = threads_per_process(config)
    if checkpoint is not None and config.cpu_threads is None:
        threads = checkpoint.state["cluster"]["threads"]
    torch.set_num_threads(threads)
    data = load_data(config, processes)
    with explain_setup_errors():
        cluster = Cluster(config, data, processes)
        if checkpoint is not None:
            cluster.resume(checkpoint)
    folder = Path(resumed) if resumed else decided(processes, lambda: make_run_folder(config, data.dataset))
    machines = processes.gather(machine(cluster.devices))
    recorder = done_by_all(
        processes, lambda: make_recorder(cluster, folder, early_log, started, checkpoint, code, machines)
    )
    return cluster, recorder, folder


def make_recorder(
    cluster: "Cluster",
    folder: Path,
    early_log: "MemoryHandler",
    started: float,
    checkpoint: "Checkpoint | None",
    code: dict | None,
    machines: list,
) -> "Observer":
    """Return the observer that records the run; only the main process records."""
    from training_logs.recording.provenance import Origin
    from training_logs.recording.recorder import RunRecorder
    from training_logs.recording.records import Observer
    from utils.config.plugins import import_plugins
    from utils.config.schema import ConfigError

    if not cluster.processes.is_main:
        return Observer()
    state = None if checkpoint is None else checkpoint.state["observer"]
    try:
        origin = Origin.of_this_program(started, code, machines, import_plugins(cluster.config.plugins))
        return RunRecorder(cluster.config, folder, early_log, started, state, origin)
    except OSError as error:
        raise ConfigError(f"the run folder cannot be used: {error}") from None


def train(cluster: "Cluster", recorder: "Observer", folder: Path) -> int:
    """Train, evaluate, save and report; return the exit status."""
    from fabrics.models.continuations import best_continuations
    from fabrics.pool.device_errors import DeviceLostError
    from fabrics.training.worker import TrainingError
    from training_logs.recording.run_folder import logger
    from utils.distributed.peers import PeerLostError

    processes = cluster.processes
    models_folder = folder / MODELS_FOLDER
    evaluations = {}
    models = {}
    texts = []
    status = "failed"
    code = 1
    can_save = processes.count == 1  # after an error, without the other processes
    try:
        with StopRequest(processes.is_main) as stop:
            evaluations = cluster.train(recorder, folder, stop)
        models = cluster.save_models(models_folder, recorder)
        if cluster.stopped:
            status = "interrupted"
            # torchrun would kill the main process if another one exited with an error.
            code = STATUS_INTERRUPTED if processes.is_main else 0
        else:
            status = "completed"
            code = 0 if models else 1
            texts = best_continuations(cluster, evaluations, recorder)
        processes.close()
    except (TrainingError, PeerLostError) as error:
        if processes.is_main:
            logger.error("error: %s", error)
        can_save = can_save and not isinstance(error, DeviceLostError)
        processes.failed(str(error))
    except KeyboardInterrupt:
        status = "interrupted"
        code = STATUS_INTERRUPTED
        processes.failed("it was interrupted")
    except Exception as error:  # a bug: the log gets the traceback, and the user keeps what was trained
        logger.exception("training failed")
        processes.failed(f"{type(error).__name__}: {error}")
    if processes.is_main:
        if not models and can_save:
            models = cluster.save_models(models_folder, recorder)
        recorder.finish(cluster, evaluations, status, models, texts)
        if code and has_checkpoint(folder):
            logger.info("to resume: python run.py --resume %s", folder)
        recorder.close()
    return code


if __name__ == "__main__":
    open_standard_streams()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(STATUS_INTERRUPTED)
