"""The plan of a run held against the run: bytes to the byte, live tensors exactly, and what does not fit is refused."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel

import run as program
from algorithms.batch.across_workers import inner_product
from algorithms.batch.per_example import PerExampleProbe
from algorithms.synchronisation import METHODS
from algorithms.theory import BatchLaw
from cluster import Cluster
from fabrics.config_checks import CHECKS, CHOICES
from fabrics.models.initialisation import initial_model, recompute_activations
from fabrics.models.meta_model import META, StepSizes, meta_model, step_sizes
from fabrics.planning import plan as planning
from fabrics.planning.expected import expected_communications
from fabrics.planning.fitting import Demand, device_loads, smallest_change
from fabrics.planning.memory import Kept, Load, Placement, device_memory, largest_micro_batch, whole_bytes
from fabrics.planning.parse_units import link, memory
from fabrics.planning.plan import Asked, Planner, make_plan, without_law
from fabrics.planning.rehearsal import Rehearsal
from fabrics.planning.text import text as text_of
from fabrics.pool.node_pool import probes_examples, round_tensors
from fabrics.sharding.whole_tensors import most_whole
from fabrics.training.flat_model import WorkingModel
from fabrics.training.forward_backward import backward
from fabrics.training.optimizers import INNER_OPTIMIZERS
from tests.support import matrix
from tests.support.helpers import (
    CPU,
    TINY_ARCHITECTURE,
    VOCABULARY,
    OneTokenModel,
    Recorder,
    light_cluster,
    make_config,
    tiny_cluster,
    tiny_data,
    tiny_llama,
)
from utils.config.reading import load_config
from utils.config.schema import Config, ConfigError
from utils.distributed.placement import Site, island_sites, share_out
from utils.utils import checkpoints_of

ROOT = Path(__file__).resolve().parents[2]

COUNTED = (
    "outer_steps", "examples", "tokens", "communications", "bytes_synchronised", "bytes_merged", "bytes_redistributed",
)  # fmt: skip
STEADY = {"sampling_method": "none", "number_of_inner_steps_between_outers": 2}


@pytest.fixture(autouse=True, scope="module")
def _plans_count_a_step_once():
    """What a step keeps follows from the model and how it is passed, which most plans here have in common."""
    found = {}

    def sizes(module, config):
        # Of tied parameters the first one alone has a name.
        parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())
        model = type(module), repr(module), repr(module.config), parameters
        key = *model, config.model_type, config.sequence_length, config.autocast, probes_examples(config)
        if key not in found:
            found[key] = step_sizes(module, config)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "step_sizes", sizes)
        yield


def counted(totals) -> dict[str, int]:
    return {name: getattr(totals, name) for name in COUNTED}


def rehearsal_of(cluster: Cluster) -> Rehearsal:
    """The same run on the meta device, before its first round."""
    with META:  # a tie made elsewhere would not survive the move
        working = WorkingModel(OneTokenModel(len(cluster.data.tokenizer)), META)
    assert working.blocks == next(iter(cluster.working.values())).blocks
    return Rehearsal(cluster.config, working, cluster.data.train, 1, cluster.config.max_batch_size)


def rehearsed(cluster: Cluster) -> Rehearsal:
    """The same, done."""
    rehearsal = rehearsal_of(cluster)
    for _ in rehearsal.rounds():
        pass
    return rehearsal


# Beside those of the matrix: this model has no layers, and one fragment.
PARAMETERS = matrix.PARAMETERS | {
    "StreamingDiLoCo": {"synchronisation": {"fragments": 1, "merge": "progress"}},
    "Decoupled": {"synchronisation": {"fragments": 1, "steps": 3}},
}


def trained(**values) -> Cluster:
    cluster = light_cluster(**(STEADY | values))
    cluster.train(Recorder())
    return cluster


@pytest.mark.parametrize(
    "values",
    [
        {"number_of_outer_steps": 5},
        {"number_of_outer_steps": 5, "communication_dtype": "int8", "outer_momentum_at_merge": "reset"},
        {"number_of_outer_steps": 5, "nodes_per_gpu": 7, "number_of_initial_trainers": 3, "merge_count": 3},
        {"nodes_per_gpu": 6, "number_of_initial_trainers": 1, "number_of_outer_steps": None, "max_tokens": 450},
        {"nodes_per_gpu": 5, "joining_moments": "zero", "merging_policy": "best_with_worst", "merge_frequency": 1},
        {"nodes_per_gpu": 2, "number_of_initial_trainers": 1, "statistics_estimator": "across_workers"}
        | {"sampling_method": "norm_test", "max_requested_batch": 4, "batch_test_start": 2},
        {"nodes_per_gpu": 8, "number_of_initial_trainers": 1, "sampling_method": "norm_test"}
        | {"max_requested_batch": 4, "statistics_batch_size": 2},
        {"batch_schedule": [[0.5, 16]], "number_of_outer_steps": 4, "smallest_worker_batch": 4, "nodes_per_gpu": 4},
        {"number_of_initial_trainers": 2, "byte_budget": 200_000, "number_of_outer_steps": None, "max_tokens": 1800},
        {
            "number_of_initial_trainers": 1,
            "node_speeds": [1, 1, 0.5, 0.25],
            "balance": "batch",
            "INITIAL_BATCH_SIZE": 20,
        },
        {
            "nodes_per_gpu": 4,
            "node_speeds": [1, 1, 0.5, 0.2],
            "balance": "steps",
            "number_of_inner_steps_between_outers": 5,
        },
        PARAMETERS["Decoupled"]
        | {"distributed_algo": "Decoupled", "nodes_per_gpu": 4, "number_of_initial_trainers": 2}
        | {"node_speeds": [1, 1, 0.5, 0.25], "number_of_inner_steps_between_outers": 4},
        {"number_of_initial_trainers": 1, "node_schedule": [[0, 3], [0.4, 4]], "participants": 0.5, "message_loss": 0.3}
        | {"number_of_outer_steps": 6},
    ],
    ids=lambda values: ",".join(values),
)
def test_a_rehearsal_counts_what_the_run_counts(values):
    cluster = trained(**values)
    rehearsal = rehearsed(cluster)
    assert counted(rehearsal.totals) == counted(cluster.totals)
    assert rehearsal.totals.lost_messages == cluster.totals.lost_messages
    assert cluster.totals.bytes_communicated > 0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_sends_what_the_plan_says(method):
    values = {"nodes_per_gpu": 4, "number_of_initial_trainers": 2, "number_of_inner_steps_between_outers": 4}
    values |= {"distributed_algo": method, "number_of_outer_steps": 4} | PARAMETERS.get(method, {})
    cluster = trained(**values)
    plan, run = counted(rehearsed(cluster).totals), counted(cluster.totals)
    if METHODS[method].unforeseen:  # but merges and redistribution are known
        plan, run = ({name: entry[name] for name in ("tokens", "bytes_merged")} for entry in (plan, run))
    assert plan == run
    assert cluster.totals.bytes_synchronised > cluster.totals.bytes_merged > 0


# Memory


def live_bytes(cluster: Cluster) -> int:
    """Of all tensors that live between rounds, gaps of flat ones included."""
    buffers = [each for w in cluster.working.values() for each in (w.parameters.data, w.gradient)]
    trainers = [tensor for trainer in cluster.trainers.values() for tensor in trainer.shared.values()]
    workers = [
        t for trainer in cluster.trainers.values() for w in trainer.workers.values() for t in w.state_dict().values()
    ]
    return sum(tensor.nbytes for tensor in (*buffers, *trainers, *workers))


def planned(cluster: Cluster, **placement) -> Demand:
    working = next(iter(cluster.working.values()))
    trainers = [(t.id, [node.id for node in t.nodes]) for t in cluster.trainers.values()]
    loads = device_loads(cluster.config, [trainers], [[node.id for node in cluster.nodes]])
    return Demand(Kept.of(cluster.config, working), None, loads, Placement(**placement))


@pytest.mark.parametrize("values", [{"message_loss": 0.1}, {"participants": 0.5}])
def test_those_who_rest_and_copies_of_those_who_are_not_heard_are_kept(values):
    cluster = trained(number_of_initial_trainers=1, number_of_outer_steps=2, nodes_per_gpu=4, **values)
    assert planned(cluster).memory(1).between_rounds == live_bytes(cluster)
    *_, last = rehearsal_of(cluster).rounds()
    (part,) = last.trainers
    assert part.all_nodes == (0, 1, 2, 3)
    assert len(part.nodes) == (2 if "participants" in values else 4)


@pytest.mark.parametrize("optimizer", INNER_OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_lives_between_rounds_is_exact(optimizer, dtype):
    cluster = light_cluster(inner_optimizer=optimizer, communication_dtype=dtype, nodes_per_gpu=6)
    assert planned(cluster).memory(1).between_rounds == live_bytes(cluster)


@pytest.mark.parametrize("method", METHODS)
def test_what_methods_keep_is_exact(method):
    values = {"distributed_algo": method, "nodes_per_gpu": 4, "number_of_initial_trainers": 2}
    values |= {"number_of_inner_steps_between_outers": 4} | PARAMETERS.get(method, {})
    cluster = light_cluster(**values)
    assert planned(cluster).memory(1).between_rounds == live_bytes(cluster)


def peak_of_a_round(cluster: Cluster) -> float:
    """The most memory that a round takes for a moment, in flat tensors."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        cluster.run_round(Recorder())
    flat = next(iter(cluster.working.values())).parameters.data.nbytes
    return _peak(profiler) / flat


LARGER = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 10}


@pytest.mark.parametrize(
    "values",
    [
        *({"distributed_algo": method} for method in METHODS),
        {"distributed_algo": "FDA", "synchronisation": {"threshold": 1e-9, "outer": "adam"}},
        {"distributed_algo": "SPARTA", "synchronisation": {"with_diloco": True}},
        {"distributed_algo": "SparseLoCo", "synchronisation": {}},
        {"distributed_algo": "LoCoDL", "synchronisation": {"probability": 1.0}},
        {"communication_dtype": "bfloat16"},
        {"communication_dtype": "int8"},
        {"statistics_estimator": "across_workers", "sampling_method": "norm_test", "max_requested_batch": 4},
    ],
    ids=str,
)
def test_what_methods_make_for_a_moment_is_planned(values, monkeypatch):
    """Beside the smallest step, a tenth of a flat tensor; those who deliver messages are planned one too many."""
    monkeypatch.setattr(inner_product, "__defaults__", (2**12,))  # as if it were a large model
    few = {"nodes_per_gpu": 2, "INITIAL_BATCH_SIZE": 2, "max_requested_batch": 2, "max_batch_size": 1}
    few |= {"number_of_initial_trainers": 1, "number_of_inner_steps_between_outers": 4, "number_of_outer_steps": 9}
    few |= {"sequence_length": 8, "eval_every": 9, "model_config": TINY_ARCHITECTURE | LARGER} | STEADY
    method = PARAMETERS.get(values.get("distributed_algo"), {})
    cluster = Cluster(make_config(**(few | method | values)), tiny_data(train=64, length=8))
    needed = max(peak_of_a_round(cluster) for _ in range(2))
    planned = round_tensors(cluster.config, 2, False)
    assert needed < planned + 0.3
    assert planned < 1.1 * needed + 1.2


def test_a_checkpoint_is_as_large_as_planned(tmp_path):
    cluster = light_cluster(**STEADY, number_of_outer_steps=1, communication_dtype="int8")
    cluster.train(Recorder(), tmp_path)
    (folder,) = checkpoints_of(tmp_path).iterdir()
    size = 0
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        size += len(content) - 8 - int.from_bytes(content[:8], "little")
    kept = Kept.of(cluster.config, next(iter(cluster.working.values())))
    assert size == kept.state_bytes(len(cluster.trainers), len(cluster.nodes))


def _peak(profiler: profile) -> int:
    """The most bytes that were allocated at one time."""
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return np.cumsum([event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]).max()


def allocated(working: WorkingModel, data, count: int) -> int:
    """The most bytes that a real step has at one time, as PyTorch's allocator tells it."""
    examples = np.arange(count)
    backward(working, data.train, examples)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backward(working, data.train, examples)
    return _peak(profiler)


@pytest.mark.parametrize("values", [{}, {"tie_word_embeddings": False}, {"num_hidden_layers": 3}, {"autocast": True}])
def test_what_a_step_needs_is_what_is_allocated(values):
    """Beside what is counted without numbers. Neither sees the parameters; what takes part in no sum over tokens is a
    few kilobytes."""
    architecture = TINY_ARCHITECTURE | {"num_hidden_layers": 2} | values
    autocast = "bfloat16" if architecture.pop("autocast", False) else None
    config, data = make_config(model_config=architecture, autocast=autocast, sequence_length=64), tiny_data(length=64)
    sizes = step_sizes(meta_model(config, data)[0], config)
    working = WorkingModel(initial_model(config, data, 0), CPU, autocast and torch.bfloat16)
    needed = allocated(working, data, 16)
    assert sizes.fixed + 16 * (sizes.activations + sizes.logits) == pytest.approx(needed, rel=0.01)


class Sequential(nn.Module):
    """A language model without a list of layers."""

    def __init__(self):
        super().__init__()
        inside = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)]
        self.all = nn.Sequential(nn.Embedding(VOCABULARY, 16), *inside, nn.Linear(16, VOCABULARY))

    def forward(self, input_ids):
        return self.all(input_ids)


class Around(nn.Module):
    """One around a model of transformers, whose settings are its own."""

    def __init__(self):
        super().__init__()
        self.inside = LlamaModel(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **TINY_ARCHITECTURE))
        self.head, self.config = nn.Linear(16, VOCABULARY), self.inside.config

    def forward(self, input_ids):
        return self.head(self.inside(input_ids).last_hidden_state)


def gpt2(**values) -> GPT2LMHeadModel:
    """Its layers are made of no linear ones."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes | values))


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("made", [Sequential, Around, gpt2])
def test_what_a_step_of_a_model_of_another_shape_needs_is_what_is_allocated(made, autocast):
    config, data = make_config(autocast=autocast, sequence_length=64), tiny_data(length=64)
    with META:
        module = made()
    sizes = step_sizes(module, config)
    needed = allocated(WorkingModel(made(), CPU, autocast and torch.bfloat16), data, 16)
    assert sizes.fixed + 16 * (sizes.activations + sizes.logits) == pytest.approx(needed, rel=0.03)


@pytest.mark.parametrize("known", [True, False])
def test_a_plan_says_where_it_does_not_know_what_a_layer_computes_again(known):
    config = make_config(activation_checkpointing=True, **STEADY)
    step = step_sizes(meta_model(config)[0], config)
    if not known:
        step = dataclasses.replace(step, recompute=lambda: None)
    planner = Planner(config, Asked(), step)
    assert any("computes again" in line for line in planner.unknown) is not known


def test_layers_that_compute_again_have_no_caches():
    config, found = make_config(sequence_length=64, activation_checkpointing=True), []
    for use_cache in (False, True):
        with META:
            module = gpt2(use_cache=use_cache)
        found.append(step_sizes(module, config).recomputed)
    assert found[0] is not None
    assert found[0] == found[1]


NARROW = TINY_ARCHITECTURE | {"num_hidden_layers": 2}
# What autocast makes of the weights of all layers, what a layer needs, and logits are most, one after the other.
WIDE = TINY_ARCHITECTURE | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512}


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "count", "tolerance"),
    [
        (NARROW, 16, 0.01),
        (WIDE, 16, 0.01),
        (WIDE | {"tie_word_embeddings": False, "num_hidden_layers": 2}, 16, 0.01),
        (WIDE, 2, 0.03),  # when the last weight of the last layer is cast, the layer no longer needs most
    ],
)
def test_what_a_step_needs_that_computes_activations_again_is_what_is_allocated(
    architecture, count, tolerance, autocast
):
    """Weights as autocast casts them are there in the forward pass, and of one layer at a time afterwards."""
    values = {"autocast": autocast, "sequence_length": 64, "activation_checkpointing": True}
    config, data = make_config(model_config=architecture, **values), tiny_data(length=64)
    kept = Kept(0, 0, False, (), ())
    planned = device_memory(
        kept, step_sizes(meta_model(config, data)[0], config), Load(0, 0, micro_batch=count), Placement.of(config)
    )
    module = initial_model(config, data, 0)
    recompute_activations(module, config.model_type)
    needed = allocated(WorkingModel(module, CPU, autocast and torch.bfloat16), data, count)
    assert planned.device == pytest.approx(needed, rel=tolerance)


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_statistics_hold_until_a_pass_ends_is_what_they_keep(autocast, tied):
    """As on islands, which look at gradients when all are there; norms have a few numbers for each example besides."""

    class Holding(PerExampleProbe):
        def _watch_gradients(self):
            pass

        def held(self) -> int:
            tensors = [t for uses in self._uses.values() for use in uses for t in vars(use).values()]
            floats = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.is_floating_point()}
            return sum(storage.nbytes() for storage in floats.values())

    architecture = TINY_ARCHITECTURE | {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    config, data = make_config(model_config=architecture, autocast=autocast, sequence_length=64), tiny_data(length=64)
    sizes = step_sizes(meta_model(config, data)[0], config)
    working = WorkingModel(initial_model(config, data, 0), CPU, autocast and torch.bfloat16)
    with Holding(working.module, 8) as probe:
        backward(working, data.train, np.arange(8), hooked=True)
        assert probe.held() == pytest.approx(8 * sizes.probed, rel=0.01)
    plain = make_config(model_config=architecture, sampling_method="none", sequence_length=64)
    assert step_sizes(meta_model(plain, data)[0], plain).probed == 0


@pytest.mark.parametrize("tied", [True, False])
def test_islands_gather_the_linear_weights_of_layers_as_autocast_casts_them(tied):
    """Two bytes for each; those of the output layer are cast wherever it is."""
    config = make_config(model_config=TINY_ARCHITECTURE | {"tie_word_embeddings": tied}, autocast="bfloat16")
    plain = make_config(model_config=TINY_ARCHITECTURE | {"tie_word_embeddings": tied})
    module, _ = meta_model(config)
    linear = sum(p.numel() for name, p in module.named_parameters() if "_proj" in name)
    head = module.lm_head.weight.numel()
    found, without = step_sizes(module, config), step_sizes(meta_model(plain)[0], plain)
    assert (found.layer_casts, without.layer_casts) == (2 * linear, 0)
    assert found.fixed - without.fixed == 2 * (linear + head)


KEPT = Kept(1000, 2001, False, ("velocity",), ("error",), 600)
STEP = StepSizes(fixed=70, activations=100, logits=40, layers=10, boundary=2, layer_casts=30)


def test_the_formula_by_hand():
    load = Load(trainers=2, workers=3, round_tensors=1, micro_batch=5)
    found = device_memory(KEPT, STEP, load, Placement())
    assert found.parts == {
        "parameters": 4000,
        "gradients": 4000,
        "moments": 3 * 8004,
        "trainers": 8000,
        "method_per_trainer": 8000,
        "method_per_worker": 12000,
        "round": 4000,
        "gathered": 0,
        "activations": 570,
        "logits": 200,
    }
    assert (found.device, found.between_rounds) == (64782, 60012)


def test_where_things_are_kept_changes_what_a_device_holds():
    load = Load(trainers=2, workers=3, round_tensors=1, micro_batch=5)
    island = device_memory(KEPT, STEP, load, Placement(devices_per_node=4))
    # A quarter of every flat tensor; 2 of 5 examples at most; layers are whole for a moment.
    assert (island.parameters, island.moments, island.gathered) == (1000, 3 * 4 * 501, 7200 - 54)
    assert (island.activations, island.logits) == (240, 80)  # a third of which is there when layers have gradients
    away = device_memory(KEPT, STEP, load, Placement(outer_state="cpu", idle_moments="cpu"))
    assert (away.trainers, away.method_per_trainer, away.moments) == (0, 0, 8004)
    assert away.host == {"moments": 2 * 8004, "trainers": 8000, "method_per_trainer": 8000, "round": 4000}
    # The sum is away as well; when x comes for a worker's difference, activations and logits are gone.
    assert (away.round, away.activations, away.logits) == (4000 - 770, 570, 200)
    more = dataclasses.replace(load, round_tensors=3, micro_batch=100)
    away = device_memory(KEPT, STEP, more, Placement(outer_state="cpu"))
    assert (away.round, away.host["round"]) == (2 * 4000, 4000)
    wide = device_memory(dataclasses.replace(KEPT, itemsize=8), STEP, load, Placement())
    assert (wide.parameters, wide.moments, wide.trainers) == (8000, 3 * 16008, 16000)
    again = device_memory(KEPT, STEP, load, Placement(activation_checkpointing=True))
    assert again.activations == 70 + 5 * (10 * 2 + 10)
    twice = device_memory(KEPT, STEP, dataclasses.replace(load, processes=2), Placement())
    assert (twice.parameters, twice.logits) == (8000, 400)


def test_the_largest_micro_batch_is_the_last_that_fits():
    load = Load(trainers=1, workers=1)
    fixed = device_memory(KEPT, STEP, load, Placement()).device
    assert largest_micro_batch(KEPT, STEP, load, Placement(), fixed + 7 * 140, 100) == 7
    assert largest_micro_batch(KEPT, STEP, load, Placement(), fixed + 8 * 140 - 1, 100) == 7
    assert largest_micro_batch(KEPT, STEP, load, Placement(), fixed - 1, 100) == 0


def test_the_smallest_change_that_fits():
    demand = Demand(KEPT, STEP, (Load(trainers=1, workers=2),), Placement())
    live = demand.memory(0).device
    assert smallest_change(demand, 9, 1, live + 4 * 140) == "max_batch_size=4"
    assert smallest_change(demand, 9, 2, live + 140 + 100) == "activation_checkpointing=true max_batch_size=3"
    assert smallest_change(demand, 9, 1, live - 8000 + 9 * 140) == "outer_state=cpu"
    assert smallest_change(demand, 9, 1, 17_500) == "devices_per_node=4 max_batch_size=8"
    assert smallest_change(demand, 9, 1, 18_000) == "devices_per_node=4"
    assert (
        smallest_change(demand, 9, 1, 18_000, lambda change: change["devices_per_node"] % 3 == 0)
        == "devices_per_node=6"
    )
    assert smallest_change(demand, 9, 1, 100) is None


# The laws


def test_growing_batches_that_reach_the_largest_at_the_end():
    # 4, 6, 8, 10, 12 in rounds of 2 inner steps use up 80 examples; or 4, 8, 16 of a doubling one 56.
    linear = expected_communications(80, (0, 0), 1, 4, 12, 2, 2.0)
    assert (linear.constant, linear.linear) == pytest.approx((10.0, 5.0))
    doubling = expected_communications(56, (0, 0), 3, 4, 16, 2, 2.0)
    assert (doubling.geometric, doubling.fastest) == pytest.approx((9.0, 9.0))
    law = BatchLaw("geometric", 4.0, math.log(1.5), 16.0)
    after = expected_communications(100 + law.examples(9, 2), (100, 7), 1, 4, 16, 2, 1.5)
    assert after.fastest == pytest.approx(7 + 9)
    assert expected_communications(80, (0, 0), 1, 4, None, 2, 2.0).linear is None


# The plan as a whole


def plan_of(asked: Asked = Asked(), **values):  # noqa: B008
    architecture = TINY_ARCHITECTURE | {"vocab_size": 300}
    return make_plan(make_config(model_config=architecture, **(STEADY | values)), asked)


def test_a_plan_says_what_the_run_says():
    values = STEADY | {"number_of_outer_steps": 5, "save_weights_every": 2}
    cluster = tiny_cluster(**values)
    plan = plan_of(**values)
    cluster.train(Recorder())
    assert plan.parameters == cluster.parameter_count
    sent = (plan.bytes.synchronised, plan.bytes.merged, plan.bytes.redistributed)
    totals = cluster.totals
    assert sent == (totals.bytes_synchronised, totals.bytes_merged, totals.bytes_redistributed)
    assert (plan.tokens, plan.communications) == (totals.tokens, totals.communications)
    assert plan.expected.constant == totals.communications
    assert plan.checkpoints.by_rounds == 3


@pytest.mark.parametrize(
    ("values", "fewer"),
    [
        ({"distributed_algo": "Decoupled", "node_speeds": [1, 0.5]}, True),
        ({"distributed_algo": "Decoupled", "node_speeds": [2, 2]}, False),
        ({"distributed_algo": "DelayedNesterov", "synchronisation": {"steps": 2}, "node_speeds": [1, 0.5]}, True),
        ({"distributed_algo": "DelayedNesterov", "node_speeds": [1, 0.5]}, False),
        ({"distributed_algo": "DelayedNesterov", "synchronisation": {"steps": 2}, "node_speeds": [1, 1]}, False),
        (
            {
                "distributed_algo": "DelayedNesterov",
                "synchronisation": {"steps": 2},
                "node_speeds": [1, 1],
                "link_latency_seconds": 1.0,
            },
            True,
        ),
    ],
)
def test_laws_are_not_about_rounds_in_which_workers_make_unlike_steps(values, fewer):
    why = without_law(make_config(**values))
    assert why == ("workers make fewer inner steps than their rounds have" if fewer else None)


def test_seconds_of_a_plan_by_hand():
    network = link("1Mb/s,100ms")
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 2, "number_of_outer_steps": 3, "max_batch_size": 1}
    plan = plan_of(Asked(devices=2, tflops=1e-6, links=(network,)), **values)
    # Four nodes with an example each, two on a device; each sends and gets 3/2 of the model once a round.
    linear = plan.parameters - 3 * 16  # norms
    flops = 9 * (6 * linear + 6 * 16 * 9)
    computing = 3 * 2 * flops / (1e6 / 2)
    sending = 3 * (0.1 + 8 * 1.5 * 4 * plan.parameters / 1e6)
    assert plan.compute_seconds == pytest.approx(computing)
    assert plan.links[0].seconds == pytest.approx(computing + sending)
    assert plan.links[0].communicating == pytest.approx(sending / (computing + sending))


def test_what_goes_out_at_one_time_waits_for_the_link_once():
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 2, "number_of_outer_steps": 2, "max_batch_size": 2}
    values |= {"sampling_method": "norm_test", "statistics_estimator": "across_workers", "max_requested_batch": 4}
    plan = plan_of(Asked(links=(link("1Mb/s,100ms"),)), **values)
    # The synchronisation and the statistics of a round: each of the two sends and gets half of the model, twice.
    assert plan.links[0].seconds == pytest.approx(2 * (0.1 + 8 * plan.bytes.synchronised / 2 / 2 / 1e6), rel=1e-3)


def test_merges_and_redistribution_take_time_as_well():
    values = {"number_of_initial_trainers": 2, "nodes_per_gpu": 2, "number_of_outer_steps": 3, "merge_frequency": 2}
    plan = plan_of(Asked(links=(link("1Mb/s,100ms"),)), **values)
    # After two rounds in which nobody sends, parameters and velocity of one trainer go to the other's node; then those,
    # both moments and their step count to the node that is free; then half of the model there and back, twice.
    bytes_ = {"merged": 8 * plan.parameters, "redistributed": 16 * plan.parameters + 4}
    assert dataclasses.asdict(plan.bytes) == bytes_ | {"synchronised": 8 * plan.parameters}
    assert plan.links[0].seconds == pytest.approx(3 * 0.1 + 8 * (sum(bytes_.values()) + 4 * plan.parameters) / 1e6)
    assert plan.links[0].communicating is None


def test_a_plan_that_fits_takes_the_largest_micro_batch():
    asked, values = Asked(memory=4_000_000), {"max_batch_size": None, "max_requested_batch": 4096, "ETA": 1.0}
    values |= {"sampling_method": "norm_test", "number_of_initial_trainers": 1, "nodes_per_gpu": 1}
    plan = plan_of(asked, **values)
    assert 1 < plan.cap.micro_batch < 4096
    assert plan.cap.micro_batch * plan.cap.accumulation_steps >= 4096
    step = (plan.memory.activations + plan.memory.logits) / plan.cap.micro_batch
    assert plan.memory.device <= 0.9 * asked.memory
    assert not any("max batch" in line for line in plan.unknown)
    with pytest.raises(ConfigError, match=r"--device-memory: .*; the smallest change that would fit: max_batch_size="):
        plan_of(asked, **values | {"max_batch_size": plan.cap.micro_batch + 2 * int(400_000 / step)})


def test_a_model_that_is_too_large_needs_more_devices():
    with pytest.raises(ConfigError, match=r"would fit: .*devices_per_node="):
        plan_of(Asked(memory=150_000))
    with pytest.raises(ConfigError, match="use a smaller model"):
        plan_of(Asked(memory=1000))


@pytest.mark.parametrize(("bound", "largest"), [(None, 64), (4096, 64), (32, 32)])
def test_the_cap_of_a_schedule_is_its_largest_batch(bound, largest):
    values = {"sampling_method": "none", "batch_schedule": [[0.1, 8], [0.5, 64]], "max_batch_size": None}
    cap = plan_of(**values, max_requested_batch=bound, number_of_initial_trainers=1, nodes_per_gpu=4).cap
    assert (cap.request, cap.workers, cap.micro_batch, cap.accumulation_steps) == (largest, 4, largest // 4, 1)


def test_at_the_cap_workers_that_wait_have_joined():
    values = {"sampling_method": "norm_test", "ETA": 1.0, "smallest_worker_batch": 16, "max_requested_batch": 48}
    plan = plan_of(**values, number_of_initial_trainers=1, nodes_per_gpu=4, max_batch_size=64)
    assert (plan.start.workers, plan.cap.workers, plan.cap.micro_batch) == (1, 3, 16)


def test_a_node_whose_neighbours_are_idle_has_the_device_for_itself():
    asked, values = Asked(tflops=1e-6), {"number_of_initial_trainers": 1, "sampling_method": "none"}
    alone = plan_of(asked, **values, nodes_per_gpu=1)
    for idle in ({"smallest_worker_batch": 16}, {"node_schedule": [[0.0, 1]]}):
        assert plan_of(asked, **values, nodes_per_gpu=4, **idle).compute_seconds == pytest.approx(alone.compute_seconds)


BUDGET = {
    "time_budget": 60.0,
    "link_bits_per_second": 1e9,
    "max_tokens": 9 * 4 * 2 * 5,
    "number_of_outer_steps": None,
    "deterministic": False,
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "idle",
    [
        {},
        {"participants": 0.5},
        {"node_schedule": [[0.0, 1]]},
        {"number_of_initial_trainers": 2},
        {"number_of_initial_trainers": 3, "merge_frequency": 3},  # a node has two of them in turn
    ],
    ids=lambda values: ",".join(values),
)
def test_budgets_of_seconds_are_planned_with_the_seconds_of_the_plan(idle, devices):
    """In a round every device passes what its nodes have, one after the other, as a process of a run does."""
    values = STEADY | {"number_of_initial_trainers": 1, "nodes_per_gpu": 2 // devices, "max_batch_size": 64} | BUDGET
    config = make_config(model_config=TINY_ARCHITECTURE | {"vocab_size": 300}, **(values | idle))
    asked = Asked(devices=devices, tflops=1e-6)
    rehearsal, rounds = Planner(config, asked).rehearse(64)
    plan, examples = make_plan(config, asked), 0
    for one in rounds:
        passed = [0] * devices
        for part in one.trainers:
            for node, own, steps in zip(part.nodes, part.plans, part.steps, strict=True):
                passed[node * devices // 2] += own.effective_batch * steps
        examples += max(passed)
    flops = 9 * (6 * (plan.parameters - 3 * 16) + 6 * 16 * 9)
    assert rehearsal.totals.training_seconds == pytest.approx(examples * flops / 1e6)
    assert plan.compute_seconds == pytest.approx(rehearsal.totals.training_seconds)
    assert (examples == rehearsal.totals.examples) is (
        devices == 1 or not {"participants", "node_schedule"}.isdisjoint(idle)
    )


def test_parameters_that_stay_take_memory_once():
    module = tiny_llama(dtype=torch.float32)
    plain = Kept.of(make_config(), WorkingModel(copy.deepcopy(module), CPU))
    module.model.layers.requires_grad_(False)
    count = sum(parameter.numel() for parameter in module.model.layers.parameters())
    kept = Kept.of(make_config(), WorkingModel(module, CPU))
    assert (plain.frozen, kept.frozen) == (0, count)
    assert plain.flat > kept.flat
    load = Load(trainers=2, workers=3, processes=2)
    for devices in (1, 2):
        memory = device_memory(kept, None, load, Placement(devices))
        assert memory.parameters == 2 * 4 * (-(-kept.flat // devices) + -(-count // devices))
        assert memory.gradients == 2 * 4 * -(-kept.flat // devices)


def test_what_stays_is_whole_for_a_moment_as_well():
    """Both layers and the one that is on its way; what is in no layer is there, and on its way before all others."""

    def gathered(*staying: str) -> int:
        module = tiny_llama(dtype=torch.float32, num_hidden_layers=4, tied=True)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(staying))
        memory = device_memory(Kept.of(make_config(), WorkingModel(module, CPU)), None, Load(1, 1), Placement(2))
        return memory.gathered // 4

    root, attention, mlp, norms = VOCABULARY * 16 + 16, 3 * 16 * 16, 3 * 16 * 24, 2 * 16
    layer, embedding = attention + mlp + norms, VOCABULARY * 16
    assert gathered("nothing") == 3 * root + 6 * layer
    assert gathered("model.layers.") == 3 * root + 3 * layer
    assert gathered("model.layers.0", "model.layers.1", "model.layers.2") == 3 * root + (3 + 2) * layer
    assert gathered(*(f"model.layers.{number}.mlp" for number in range(4))) == 3 * root + 6 * (layer - mlp) + 3 * mlp
    assert gathered("model.embed", "model.layers.") == embedding + 3 * 16 + max(embedding, 3 * layer)


def test_an_island_of_a_machine_without_gpus_is_planned():
    assert plan_of(devices=["cpu"], devices_per_node=2).nodes == plan_of(devices_per_node=2).nodes


@pytest.mark.parametrize(("devices", "size", "nodes"), [(4, 2, 4), (4, 2, 3), (6, 2, 7), (8, 4, 2)])
def test_islands_on_cpus_share_the_nodes_of_their_machine(devices, size, nodes):
    """As processes share them out when a run begins."""
    values = {"devices": ["cpu"], "devices_per_node": size, "nodes_per_gpu": nodes, "number_of_initial_trainers": 1}
    sites = [Site(rank, 0, {"cpu": "cpu"}) for rank in range(devices)]
    slots = share_out(island_sites(sites, size, 0), nodes)
    config = make_config(model_config=TINY_ARCHITECTURE | {"vocab_size": 300}, **(STEADY | values))
    asked = Asked(devices=devices, tflops=1e-6)
    planner, plan = Planner(config, asked), make_plan(config, asked)
    owners = {slot.owner: [node for node, other in enumerate(slots) if other.owner == slot.owner] for slot in slots}
    assert list(map(list, planner.nodes_of)) == list(owners.values())
    assert planner._processes().groups == tuple(slot.group for slot in slots)
    assert (plan.nodes, plan.devices) == (len(slots), devices) == (nodes, devices)
    alone = plan_of(**values)  # what these send does not depend on who owns them
    assert (plan.bytes, plan.rounds) == (alone.bytes, alone.rounds)
    most = max(map(len, owners.values()))
    assert plan.compute_seconds == pytest.approx(
        most / nodes * make_plan(config, Asked(size, tflops=1e-6)).compute_seconds
    )
    # Each of them has the parts of the largest share of the workers.
    assert plan.memory.moments * nodes == most * alone.memory.moments


def test_more_islands_than_nodes_on_cpus_are_refused():
    with pytest.raises(ConfigError, match=r"--devices: 6 processes on CPUs are 3 islands .* has 2 nodes"):
        plan_of(Asked(devices=6), devices=["cpu"], devices_per_node=2, nodes_per_gpu=2)


def test_state_on_the_host_is_planned_and_advised():
    values = {"activation_checkpointing": True, "max_batch_size": 1, "eval_batch_size": 1}  # nothing else can be less
    plain, away = plan_of(**values), plan_of(**values, outer_state="cpu", idle_moments="cpu")
    assert (away.bytes, away.rounds, away.communications) == (plain.bytes, plain.rounds, plain.communications)
    assert away.memory.device + sum(away.memory.host.values()) == plain.memory.device
    advice = []
    for budget in np.linspace(away.memory.device, plain.memory.device - 1, 5):
        with pytest.raises(ConfigError, match="would fit: ") as caught:
            plan_of(Asked(memory=math.ceil(budget / 0.9)), **values)
        advice.append(str(caught.value))
    assert any("outer_state=cpu" in line for line in advice)
    # The memory of CPUs is the host's.
    values |= {"devices": ["cpu"], "outer_state": "cpu", "idle_moments": "cpu"}
    assert plan_of(**values).memory == plain.memory
    with pytest.raises(ConfigError, match=r"would fit: devices_per_node=\d+$"):
        plan_of(Asked(memory=math.ceil(away.memory.device / 0.9)), **values | {"outer_state": "device"})


@pytest.mark.parametrize("text", ["", "1Gb", "fast", "1Gb/s,20", "0Gb/s", "1Gb/s,-2ms", "1 Gb/s", "1Gb/s,20ms,3"])
def test_links_that_are_none(text, capsys):
    with pytest.raises(ValueError, match="such as 1Gb/s,20ms"):
        link(text)
    assert program.main(["--plan", f"--link={text}"]) == 2
    assert "error: --link: must be a rate in bits (b) or bytes (B)" in capsys.readouterr().err


def test_a_plan_as_text_rounds_communications_up_and_says_where_shares_differ():
    unequal = {"nodes_per_gpu": 3, "node_speeds": [1, 1, 0.5], "balance": "batch", "INITIAL_BATCH_SIZE": 6}
    one = {"number_of_initial_trainers": 1, "number_of_outer_steps": None}
    examples = 2 * 6 * 2 + 6  # two rounds of two inner steps, and one of a single step
    plan = plan_of(**one, **unequal, max_tokens=examples * make_config().sequence_length)
    said = text_of(plan, Asked())
    assert "batch at the start: 6 examples (at most 3 x 1 on each of 3 nodes)" in said
    assert plan.communications == 3
    assert "communications by the laws: 3 with a batch that stays" in said
    equal = text_of(plan_of(**one, **(unequal | {"balance": "equal"}), max_tokens=1), Asked())
    assert "batch at the start: 6 examples (2 x 1 on each of 3 nodes)" in equal


def test_links_and_sizes():
    assert [(n.bits_per_second, n.latency) for n in map(link, ("1Gb/s,20ms", "2.5MB/s", "64kb/s,1.5s"))] == [
        (1e9, 0.02),
        (2e7, 0.0),
        (64e3, 1.5),
    ]
    assert (memory("80GB"), memory("1.5GiB"), memory("100B")) == (80 * 10**9, 3 * 2**29, 100)
    for text in ("80", "GB", "0GB", "1iB"):
        with pytest.raises(ValueError, match="such as 80GB"):
            memory(text)


def test_the_command(tmp_path, capsys):
    small = ["model_config.num_hidden_layers=1", "max_tokens=20000", "number_of_outer_steps=null"]
    file = tmp_path / "plan.json"
    assert program.main(["--plan", "--link=1Gb/s,20ms", "--tflops=0.1", f"--json={file}", *small]) == 0
    said = capsys.readouterr().out
    assert "over 1Gb/s,20ms: " in said
    assert "not known: the data" in said
    assert program.main(["--plan", "--link=1Gb/s,20ms", "--tflops=0.1", "--json=-", *small]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert program.main(["--plan", "--device-memory=1MB", *small]) == 2
    assert capsys.readouterr().err.startswith("error: --device-memory: ")
    assert program.main(["--plan", "--devices=0", "--tflops=much", *small]) == 2
    assert capsys.readouterr().err.count("error: --") == 2
    with pytest.raises(SystemExit):
        program.main(["--link=1Gb/s"])
    assert "--link has a meaning with --plan only" in capsys.readouterr().err


def test_a_node_of_several_devices(monkeypatch):
    monkeypatch.setattr(Placement, "of", classmethod(lambda cls, config: cls(devices_per_node=4)))
    with pytest.raises(ConfigError, match=r"--devices: must be a multiple of devices_per_node, 4, got 6"):
        plan_of(Asked(devices=6))
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 1}
    plan = plan_of(Asked(devices=8, tflops=1e-6), **values)
    alone = make_plan(make_config(model_config=TINY_ARCHITECTURE | {"vocab_size": 300}, **STEADY | values), Asked(4))
    assert (plan.nodes, alone.nodes) == (2, 1)
    assert plan.bytes.synchronised == 3 * 2 * 4 * plan.parameters
    flops = 9 * (6 * (plan.parameters - 3 * 16) + 6 * 16 * 9)
    assert plan.compute_seconds == pytest.approx(3 * 2 * 2 * flops / 4e6)  # two examples on each node


@pytest.mark.parametrize(
    ("name", "parameters", "fits_one_device"),
    [("c4_llama_1b", 1_100_048_384, True), ("c4_llama_3b", 3_426_473_600, False)],
)
def test_the_large_configurations_are_for_islands_of_8(name, parameters, fits_one_device):
    """Parameters as TinyLlama 1.1B and OpenLLaMA 3B are published."""
    config, _ = load_config(ROOT / "configs" / f"{name}.yaml", (), CHOICES, CHECKS)
    module, _ = meta_model(config)
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    kept = Kept.of(config, WorkingModel(module, META))
    step = step_sizes(meta_model(config)[0], config)
    (load,) = device_loads(config, [[(0, [0])]], [[0]])
    island = Demand(kept, step, (load,), Placement(devices_per_node=8))
    assert island.largest(0.9 * 80e9) >= config.max_batch_size
    assert (island.placed(devices_per_node=1).largest(0.9 * 80e9) >= 2) is fits_one_device


def test_what_is_whole_for_a_moment_by_hand():
    """Layers in passes, with what compares devices' gradients; or the tensors that the fullest device has whole."""
    load = Load(trainers=1, workers=1)

    def gathered(devices: int, **values) -> int:
        return device_memory(dataclasses.replace(KEPT, **values), None, load, Placement(devices)).gathered

    assert gathered(4, compared=100) == 4 * (3 * 600 + 100)
    sizes = (500, 400, 300, 200)
    assert gathered(2, looked_at=sizes, whole_copies=4) == 4 * 4 * 700  # 500 and 200, 400 and 300
    assert gathered(4, looked_at=sizes, whole_copies=4) == 4 * 4 * 500
    assert gathered(4, looked_at=(400, 200), whole_copies=4) == 4 * 3 * 600
    assert gathered(4, looked_at=(400, 200), whole_copies=6) == 4 * 6 * 400
    assert gathered(1, looked_at=sizes, whole_copies=4, compared=100) == 0
    # Between passes there are no activations and no logits, of which each of four devices has 240 and 80 bytes.
    busy = dataclasses.replace(load, micro_batch=5)
    kept = dataclasses.replace(KEPT, looked_at=sizes, whole_copies=4)
    assert device_memory(kept, STEP, busy, Placement(devices_per_node=4)).gathered == 4 * 4 * 500 - 240 - 80
    large = dataclasses.replace(STEP, logits=12_000)  # all that is whole for a moment comes when they are gone
    assert device_memory(kept, large, busy, Placement(devices_per_node=4)).gathered == 0
    assert whole_bytes(1400, 4, 4) == 2 * 4 * 1400 * 3 / 4


@pytest.mark.parametrize(
    ("copies", "values"),
    [
        (4, {"inner_optimizer": "muon"}),
        (6, {"distributed_algo": "DeMo"}),
        (6, {"distributed_algo": "SparseLoCo", "inner_optimizer": "muon"}),
    ],
)
def test_methods_have_whole_tensors_more_often_than_muon(copies, values):
    """Resident peaks of one `exchange` of tensors of 8192 x 4096: DeMo 5.4 times these, SparseLoCo 5.3."""
    working = tiny_cluster(**values).working.first
    kept = Kept.of(make_config(**values), working)
    assert (working.whole_copies, kept.whole_copies) == (copies, copies)
    memory = device_memory(kept, None, Load(trainers=1, workers=1), Placement(devices_per_node=2))
    assert memory.gathered == 4 * max(3 * kept.gathered, copies * most_whole(kept.looked_at, 2))


def test_what_islands_send_for_whole_tensors_is_planned():
    """There and back half of every tensor that is needed whole, of two devices; between islands nothing changes. And in
    passes all layers twice, and their gradients once."""
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 1}
    matrices = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16
    by_method, by_optimizer = "each message of a worker, and each mean", "each inner step of a worker"
    for own, kinds in (
        ({"inner_optimizer": "muon"}, [by_optimizer]),
        ({"distributed_algo": "DeMo"}, [by_method]),
        ({"distributed_algo": "SparseLoCo", "inner_optimizer": "muon"}, [by_method, by_optimizer]),
        ({}, []),
    ):
        plan = plan_of(Asked(devices=4), **values, **own, devices_per_node=2)
        whole = {by_method: plan.parameters, by_optimizer: matrices}
        passed = {"each micro-batch": 3 * 4 * plan.parameters}
        assert plan.whole_bytes == passed | {kind: 2 * 4 * whole[kind] // 2 for kind in kinds}
        alone = plan_of(Asked(devices=2), **values, **own)
        assert alone.whole_bytes == {}
        assert plan.bytes == alone.bytes
        said = text_of(plan, Asked(devices=4)).count("whole tensors: devices of an island send")
        assert said == 1 + len(kinds)


def test_keys_of_placement_that_a_configuration_lacks_have_defaults():
    placement = Placement.of(Config())
    assert (placement.devices_per_node, placement.outer_state) == (1, "device")


def test_an_evaluation_batch_takes_what_it_needs():
    """One layer's activations, logits and their logarithms; where a step needs less, a device has to hold that."""
    step = StepSizes(fixed=10, activations=60, logits=30, layers=3)
    load = Load(trainers=1, workers=1, micro_batch=4)
    small, large = (
        device_memory(KEPT, step, dataclasses.replace(load, evaluated=examples), Placement()) for examples in (8, 10)
    )
    assert (small.activations, small.logits) == (4 * 60 + 10, 4 * 30)
    assert (large.activations, large.logits) == (10 * 20 + 10, 10 * 20)
    halves = dataclasses.replace(load, evaluated=10)
    assert device_memory(KEPT, step, halves, Placement(devices_per_node=2)).logits == 10 * 20  # nobody shares it
    demand = Demand(KEPT, step, (dataclasses.replace(load, evaluated=1000),), Placement())
    budget = demand.evaluating(100).memory(4).device
    assert smallest_change(demand, 4, 1, budget) == "eval_batch_size=100"


def test_a_probe_batch_counts_in_the_plan():
    values = {
        "sampling_method": "norm_test",
        "max_requested_batch": 4,
        "statistics_batch_size": 40,
        "eval_batch_size": 1,
    }
    asked = {size: plan_of(**values, max_batch_size=size).memory for size in (8, 64)}
    plain = plan_of(**(values | {"sampling_method": "none"}), max_batch_size=64).memory
    assert asked[64].logits == 5 * asked[8].logits > plain.logits


def test_a_change_that_the_configuration_refuses_is_not_advised():
    """Several processes on a device do not go with more devices in a node."""
    with pytest.raises(ConfigError) as caught:
        plan_of(Asked(memory=150_000), processes_per_gpu=2)
    assert "devices_per_node" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"would fit: .*devices_per_node="):
        plan_of(Asked(memory=150_000))


def test_epochs_of_data_that_workers_share_are_planned(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"text {number} of some words " * 20 for number in range(400)))
    values = {"dataset": "text", "text_files": [str(tmp_path / "text.txt")], "text_documents": "blank_lines"}
    values |= {"number_of_outer_steps": None, "number_of_training_epochs": 1, "data_split_over": "workers"}
    values |= {"cache_dir": str(tmp_path), "nodes_per_gpu": 2, "number_of_initial_trainers": 1}
    assert make_plan(make_config(model_config=TINY_ARCHITECTURE, **(STEADY | values)), Asked()).rounds > 1
