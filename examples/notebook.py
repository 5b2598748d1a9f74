"""A run from Python, without the command line: build, train, read the results as arrays.

Cells begin with `# %%`, for Jupyter, VS Code or Spyder. As a script, in half a minute on a CPU:

    python examples/notebook.py [key=value ...]
"""

# %% Add the project to the path, as it is not installed
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.dataset_loader import load_data
from training_logs.recording.recorder import RunRecorder
from training_logs.recording.run_folder import make_run_folder, start_logging
from training_logs.showing.run_data import read_run
from utils.config.reading import load_config
from utils.distributed.launch import threads_per_process
from utils.run_layout import MODELS_FOLDER

# %% A configuration: a file, and values that differ from it
shorter = ["max_tokens=150000", "data_sample_size=1000", "clearml=off", "plot_at_end=false"]
config, _ = load_config(ROOT / "config.yaml", [*shorter, *sys.argv[1:]], CHECKS)
torch.set_num_threads(threads_per_process(config))

# %% The data, and a cluster of trainers on nodes, in this process
data = load_data(config)
cluster = Cluster(config, data)
print(f"{cluster.parameter_count:,} parameters, {len(cluster.trainers)} trainers on {len(cluster.nodes)} nodes")

# %% Training; the recorder is an Observer, and one of your own may override any of its methods
log = start_logging()
folder = make_run_folder(config, data.dataset)
recorder = RunRecorder(config, folder, log, started=time.perf_counter())
evaluations = cluster.train(recorder, folder)
models = cluster.save_models(folder / MODELS_FOLDER, recorder)
recorder.finish(cluster, evaluations, "completed", models)
recorder.close()

# %% The results, as NumPy arrays
run = read_run(folder)
best = run.by_trainer[run.summary["best_trainer"]]
losses = run.step_losses[run.summary["best_trainer"]][1]
print("tokens:    ", best["tokens"].astype(int))
print("perplexity:", best["validation_metric"].round(1))
print("batches:   ", best["requested_batch"].astype(int))
print(f"loss of the first and the last ten inner steps: {losses[:10].mean():.2f}, {losses[-10:].mean():.2f}")
