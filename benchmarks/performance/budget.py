"""Whether runs end with what their budget allows: python benchmarks/performance/budget.py [--jobs N] [--folder F]
[--json FILE].

Runs of 2M tokens, or of half as many, on two corpora, packed and padded, with two sizes of the model, fixed batches,
batches of the norm test with workers that join, and planned batches, from one trainer and from four that merge, with
all methods that take a budget; for 15 to 200 communications, or bytes or seconds for about as many. Each is an ordinary
run of run.py with overrides, on one process with one thread, about a minute of one core; one that is in the folder is
not made again. Prints what each used and by how much that is off; the exit status is 1 where it is more than 5%.
"""

import argparse
import json
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from benchmarks.compare.runs import made_run
from utils.utils import budget_used, write_json_atomically

LARGEST_PERCENT = 5.0
_ONE = ("number_of_initial_trainers=1",)
_SMALL = ("model_config.num_hidden_layers=1", "model_config.hidden_size=32", "model_config.intermediate_size=88")
_HALF = ("max_tokens=1000000",)
_CODE = ("dataset=text", f"text_files=[{sysconfig.get_path('stdlib')}/asyncio/*.py]", "text_documents=blank_lines")
_PADDED = (*_CODE, "packing=false")
_LINK = ("link_bits_per_second=20e6", "link_latency_seconds=0.02", "deterministic=false")
_FEDOPT = ("distributed_algo=FedOpt", "learning_rate_for_outer_opt=0.003")
_FIXED = (*_ONE, "sampling_method=none", "smallest_worker_batch=null")
_ALL = ("smallest_worker_batch=null",)
_PLANNED = (*_ALL, "budget_sets=batch")
# Name -> overrides. The demo's batches, and so its workers, are those of the norm test.
RUNS: dict[str, tuple[str, ...]] = {
    "demo, 15": ("communication_budget=15",),
    "demo, 50": ("communication_budget=50",),
    "demo, 100": ("communication_budget=100",),
    "one trainer, 25": (*_ONE, "communication_budget=25"),
    "one trainer, 200": (*_ONE, "communication_budget=200"),
    "one trainer, small, code, 30": (*_ONE, *_SMALL, *_CODE, *_HALF, "communication_budget=30"),
    "all workers, 40": (*_ALL, "communication_budget=40"),
    "all workers, one trainer, 100": (*_ALL, *_ONE, "communication_budget=100"),
    "all workers, small, code, 60": (*_ALL, *_SMALL, *_CODE, *_HALF, "communication_budget=60"),
    "fixed 16, 50": (*_FIXED, "communication_budget=50"),
    "fixed 16, 200": (*_FIXED, "communication_budget=200"),
    "fixed 32, small, 15": (*_FIXED, *_SMALL, *_HALF, "INITIAL_BATCH_SIZE=32", "communication_budget=15"),
    "fixed 8, code, 100": (*_FIXED, *_CODE, *_HALF, "INITIAL_BATCH_SIZE=8", "communication_budget=100"),
    "planned, 50": (*_PLANNED, *_ONE, "number_of_inner_steps_between_outers=40", "communication_budget=50"),
    "planned, four trainers, 30": (*_PLANNED, "number_of_inner_steps_between_outers=20", "communication_budget=30"),
    "planned, small, code, 100": (*_PLANNED, *_ONE, *_SMALL, *_CODE, *_HALF, "communication_budget=100"),
    "demo, 60 MB": ("byte_budget=60000000",),
    "one trainer, 150 MB": (*_ONE, "byte_budget=150000000"),
    "fixed 16, int8, 20 MB": (*_FIXED, "communication_dtype=int8", "byte_budget=20000000"),
    "planned, 100 MB": (*_PLANNED, *_ONE, "number_of_inner_steps_between_outers=30", "byte_budget=100000000"),
    "demo, padded, 60": (*_PADDED, *_HALF, "communication_budget=60"),
    "fixed 16, padded, 100": (*_FIXED, *_PADDED, *_HALF, "communication_budget=100"),
    "all workers, padded, 150 MB": (*_ALL, *_ONE, *_PADDED, *_HALF, "byte_budget=150000000"),
    "LocalSGD, fixed 16, 80": (*_FIXED, *_HALF, "distributed_algo=LocalSGD", "communication_budget=80"),
    "FedOpt, one trainer, 40": (*_ONE, *_HALF, *_FEDOPT, "communication_budget=40"),
    "NoLoCo, all workers, 50": (*_ONE, *_ALL, *_HALF, "distributed_algo=NoLoCo", "communication_budget=50"),
    "EagerDiLoCo, padded, 30": (*_FIXED, *_PADDED, *_HALF, "distributed_algo=EagerDiLoCo", "communication_budget=30"),
    "SparseLoCo, 2 MB": (*_FIXED, *_HALF, "distributed_algo=SparseLoCo", "byte_budget=2000000"),
    "Muon, demo, 120": (*_HALF, "inner_optimizer=muon", "communication_budget=120"),
    "fixed 16, 90 s": (*_FIXED, *_HALF, *_LINK, "time_budget=90"),
    "one trainer, 50 s": (*_ONE, *_HALF, *_LINK, "time_budget=50"),
}


def made(name: str, folder: Path) -> dict:
    """What the run says of its budget."""
    place = folder / "".join(letter if letter.isalnum() else "_" for letter in name)
    run = made_run(place, "config.yaml", ("max_batch_size=64", *RUNS[name]))
    (path,) = run.glob("*/summary.json")
    summary = json.loads(path.read_text(encoding="utf-8"))
    return summary["budget"] | {"metric": summary["final_metric"], "rounds": summary["outer_steps"]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold what runs used against their budgets.")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    parser.add_argument("--folder", type=Path, default=Path("logs/budget"), help="of the runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    options = parser.parse_args(arguments)
    found = {}
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(RUNS), desc="budgets", unit=" runs") as bar:
        for name, one in zip(RUNS, pool.map(lambda name: made(name, options.folder), RUNS), strict=True):
            found[name] = one
            bar.update()
            tqdm.write(f"{name:30} {budget_used(one):44} {one['rounds']:>4} rounds, {one['metric']:.2f}")
    if options.json is not None:
        write_json_atomically(options.json, found)
    off = [abs(one["deviation_percent"]) for one in found.values()]
    held = sum(value <= LARGEST_PERCENT for value in off)
    print(f"{held} of {len(off)} runs within {LARGEST_PERCENT:g}%; {max(off):.1f}% at worst")
    return int(max(off) > LARGEST_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
