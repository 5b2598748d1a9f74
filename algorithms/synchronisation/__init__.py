"""Synchronisation of the workers of a trainer: one file per method; `method.py` is the interface."""

from algorithms.registry import Registry
from algorithms.synchronisation.decoupled import Decoupled
from algorithms.synchronisation.delayed_nesterov import DelayedNesterov
from algorithms.synchronisation.demo import DeMo
from algorithms.synchronisation.diloco import DiLoCo
from algorithms.synchronisation.eager import EagerDiLoCo
from algorithms.synchronisation.fda import FDA
from algorithms.synchronisation.fed_opt import FedOpt
from algorithms.synchronisation.local_sgd import LocalSGD
from algorithms.synchronisation.locodl import LoCoDL
from algorithms.synchronisation.method import Method, check_registered
from algorithms.synchronisation.noloco import NoLoCo
from algorithms.synchronisation.sparse_loco import SparseLoCo
from algorithms.synchronisation.sparta import SPARTA
from algorithms.synchronisation.streaming import StreamingDiLoCo
from algorithms.synchronisation.synchronous import Synchronous

_METHODS = (
    DiLoCo, LocalSGD, Synchronous, FedOpt, StreamingDiLoCo, EagerDiLoCo, NoLoCo, SparseLoCo, DeMo, SPARTA, FDA, LoCoDL,
    DelayedNesterov, Decoupled,
)  # fmt: skip
# The values of `distributed_algo`.
METHODS: Registry[type[Method]] = Registry({method.__name__: method for method in _METHODS}, check_registered)
