"""AdLoCo from the command line: python run.py [--config PATH] [key=value ...]."""

import argparse
import os
import sys
import time


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train language models with little communication (AdLoCo).",
        epilog="Every key of the configuration can be given as key=value, nested keys with dots: "
        "python run.py ETA=0.5 model_config.hidden_size=128",
    )
    parser.add_argument("--config", default="config.yaml", help="configuration file (default: config.yaml)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Config -> data -> cluster -> train -> evaluate -> report; the exit status.

    0: done; 1: training stopped with an error that its message explains; 2: bad configuration, nothing done;
    130: interrupted. What was trained up to then is in the run folder in all cases but 2.
    """
    started = time.perf_counter()
    options = parse_arguments(arguments)
    # Imported here, so that --help answers at once.
    import torch

    from cluster import CHECKS, CHOICES, Cluster
    from fabrics.dataset_loader import load_data
    from trainers import TrainingError
    from training_logs.training_monitoring import RunRecorder, check_logs, logger, make_run_folder, start_logging
    from utils.config import ConfigError, load_config

    kept = start_logging()
    try:
        config, warnings = load_config(options.config, options.overrides, CHOICES, CHECKS)
        check_logs(config)
        if config.CUDA_VISIBLE_DEVICES is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = config.CUDA_VISIBLE_DEVICES
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        data = load_data(config)
        cluster = Cluster(config, data)
        recorder = RunRecorder(config, make_run_folder(config, data.dataset), kept, started)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    for warning in warnings:
        recorder.warn(warning)
    final = {}
    try:
        final = cluster.train(recorder)
        recorder.finish(cluster, final, "completed")
        return 0
    except KeyboardInterrupt:
        recorder.finish(cluster, final, "interrupted")
        return 130
    except TrainingError as error:
        logger.error("error: %s", error)
        recorder.finish(cluster, final, "failed")
        return 1
    except Exception:
        # Not foreseen: whoever mends it needs the traceback, and the user keeps what was trained.
        logger.exception("training failed")
        recorder.finish(cluster, final, "failed")
        return 1
    finally:
        recorder.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
