"""AdLoCo from the command line: python run.py [--config PATH | --resume RUN_DIR | --plan] [key=value ...]."""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# What is imported here is quick; the rest waits until there is something on the screen.
from fabrics.planning import command as planning
from utils.distributed.launch import Launch, is_main, start_processes, started_by_others, threads_per_process
from utils.distributed.signals import STATUS_INTERRUPTED, StopRequest
from utils.run_layout import CHECKPOINTS_FOLDER, MODELS_FOLDER, has_checkpoint

if TYPE_CHECKING:
    from logging.handlers import MemoryHandler

    from cluster import Cluster
    from training_logs.recording.records import Observer
    from utils.config.schema import Config
    from utils.distributed.processes import Processes


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train language models with little communication (AdLoCo).",
        epilog="Every key of the configuration can be given as key=value, nested keys with dots: "
        "python run.py ETA=0.5 model_config.hidden_size=128. Under torchrun the processes are torchrun's, otherwise "
        "those of the key processes.",
    )
    parser.add_argument("--config", help="configuration file (default: config.yaml)")
    parser.add_argument(
        "--resume",
        metavar="RUN_DIR",
        help="resume the run in this folder from its last checkpoint; auto: the one in log_dir/run_name if it has one, "
        "otherwise begin it",
    )
    parser.add_argument(
        "--force", action="store_true", help="with --resume: allow overrides that change how the run trains"
    )
    planning.add_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    options = parser.parse_intermixed_args(arguments)
    if options.resume not in (None, "auto") and options.config:
        parser.error("--resume takes the configuration from the run folder; give --config or --resume")
    if options.force and not options.resume:
        parser.error("--force has a meaning with --resume only")
    if options.plan and options.resume:
        parser.error("--plan is for a run that is not begun; give --plan or --resume")
    planning.check_options(parser, options)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Start the processes of the run, and be one of them; the exit status.

    0: done; 1: training stopped with an error that its message explains; 2: bad configuration, nothing done;
    130: interrupted. What was trained up to then is in the run folder in all cases but 2.
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
        folder = options.resume if options.resume != "auto" else None
        config = Path(folder, "config.yaml") if folder else Path(options.config or "config.yaml")
        others = start_processes(config, options.overrides, [__file__, *arguments])
    except ConfigError as error:
        return refused(error)
    with others as launch:
        status = run(options, started, launch)
        if status and launch is not None:
            launch.kill()
        return status


def run(options: argparse.Namespace, started: float, launch: Launch | None) -> int:
    """Be one of the processes of the run: meet the others, set up, train; the exit status of this one."""
    from training_logs.recording.run_folder import start_logging
    from utils.checkpoint.checkpoint import CheckpointError
    from utils.checkpoint.run_lock import lock_run_in_main
    from utils.config.resume import folder_to_resume
    from utils.config.schema import ConfigError
    from utils.distributed.collective_checks import agree_on_config, decided, done_by_all
    from utils.distributed.peers import PeerLostError
    from utils.distributed.processes import meet, place_nodes

    kept = start_logging(is_main())
    try:
        processes = meet(launch)
    except PeerLostError as error:
        return refused(error)
    with contextlib.ExitStack() as claims:
        try:
            resume = decided(processes, lambda: folder_to_resume(options.resume, options.config, options.overrides))
            config, warnings = done_by_all(processes, lambda: configured(options, resume))
            claims.enter_context(lock_run_in_main(processes, resume))
            agree_on_config(processes, config)
            warnings += place_nodes(processes, config)
            cluster, recorder, folder = set_up(config, processes, resume, kept, started)
            if not resume:
                claims.enter_context(lock_run_in_main(processes, folder))
        except (ConfigError, CheckpointError, PeerLostError) as error:
            processes.failed(str(error))
            return refused(error)
        for warning in warnings:
            recorder.warn(warning)
        return train(cluster, recorder, folder)


def configured(options: argparse.Namespace, resume: str | None) -> tuple["Config", list[str]]:
    """The configuration of the run, checked, and warnings."""
    from fabrics.config_checks import CHECKS
    from training_logs.recording.run_folder import check_logs
    from utils.config.reading import load_config
    from utils.config.resume import resumed_config

    if resume:
        return resumed_config(Path(resume), options.overrides, options.force, CHECKS)
    config, warnings = load_config(options.config or "config.yaml", options.overrides, CHECKS)
    check_logs(config, anew=options.resume is None)
    return config, warnings


def refused(error: Exception) -> int:
    """Say why nothing is done; the exit status for that, or for another process that has died."""
    if is_main():
        for problem in getattr(error, "problems", [str(error)]):
            print(f"error: {problem}", file=sys.stderr)
    return 2 if isinstance(error, ValueError) else 1


def set_up(
    config: "Config", processes: "Processes", resume: str | None, kept: "MemoryHandler", started: float
) -> tuple["Cluster", "Observer", Path]:
    """The cluster, who records it, and the run folder; where a run is resumed, as its last checkpoint has them."""
    import torch

    from cluster import Cluster
    from fabrics.data.dataset_loader import load_data
    from fabrics.pool import device_errors
    from fabrics.pool.run_checks import check_nodes
    from training_logs.recording.provenance import Origin, code_of, machine
    from training_logs.recording.recorder import RunRecorder
    from training_logs.recording.records import Observer
    from training_logs.recording.run_folder import make_run_folder
    from utils.checkpoint.checkpoint import newest_checkpoint
    from utils.config.plugins import import_plugins
    from utils.config.schema import ConfigError
    from utils.distributed.collective_checks import decided, done_by_all

    check_nodes(config, processes.devices)
    # Before the data, which may take long: what is asked for is the code that has just been read.
    code = code_of() if processes.is_main else None
    checkpoint = None
    state = None
    threads = threads_per_process(config)
    if resume:
        checkpoint = newest_checkpoint(Path(resume, CHECKPOINTS_FOLDER), processes)
        state = checkpoint.state["observer"]
        if config.cpu_threads is None:
            threads = checkpoint.state["cluster"]["threads"]
    torch.set_num_threads(threads)
    data = load_data(config, processes)
    with device_errors.explain_setup_errors():
        cluster = Cluster(config, data, processes)
        if checkpoint is not None:
            cluster.resume(checkpoint)
    folder = Path(resume) if resume else decided(processes, lambda: make_run_folder(config, data.dataset))
    machines = processes.gather(machine(cluster.devices))

    def recorded() -> Observer:
        if not processes.is_main:
            return Observer()
        try:
            origin = Origin.of_this_program(started, code, machines, import_plugins(config.plugins))
            return RunRecorder(config, folder, kept, started, state, origin)
        except OSError as error:
            raise ConfigError(f"the run folder cannot be used: {error}") from None

    return cluster, done_by_all(processes, recorded), folder


def train(cluster: "Cluster", recorder: "Observer", folder: Path) -> int:
    """Train, evaluate and report; the exit status."""
    from fabrics.models.continuations import best_continuations
    from fabrics.pool.device_errors import DeviceLostError
    from fabrics.training.worker import TrainingError
    from training_logs.recording.run_folder import logger
    from utils.distributed.peers import PeerLostError

    processes = cluster.processes
    weights = folder / MODELS_FOLDER
    final, models, texts = {}, {}, []
    status, code = "failed", 1
    keeps_model = processes.count == 1
    try:
        with StopRequest(processes.is_main) as stop:
            final = cluster.train(recorder, folder, stop)
        models = cluster.save_models(weights, recorder)
        if cluster.stopped:
            # The main process says so for all: torchrun would end it when another process had another status than 0.
            status, code = "interrupted", STATUS_INTERRUPTED if processes.is_main else 0
        else:
            status, code = "completed", 0 if models else 1
            texts = best_continuations(cluster, final, recorder)
        processes.close()
    except (TrainingError, PeerLostError) as error:
        if processes.is_main:
            logger.error("error: %s", error)
        keeps_model = keeps_model and not isinstance(error, DeviceLostError)
        processes.failed(str(error))
    except KeyboardInterrupt:
        status, code = "interrupted", STATUS_INTERRUPTED
        processes.failed("it was interrupted")
    except Exception as error:
        # Not foreseen: whoever mends it needs the traceback, and the user keeps what was trained.
        logger.exception("training failed")
        processes.failed(f"{type(error).__name__}: {error}")
    if processes.is_main:
        if not models and keeps_model:
            models = cluster.save_models(weights, recorder)
        recorder.finish(cluster, final, status, models, texts)
        if code and has_checkpoint(folder):
            logger.info("to go on: python run.py --resume %s", folder)
        recorder.close()
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(STATUS_INTERRUPTED)
