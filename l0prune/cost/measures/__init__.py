"""Measures that a budget can limit: params, MACs, slots, milliseconds, and the user's own."""

from l0prune.cost.amounts import Amounts
from l0prune.cost.measures.base import Measure, Source
from l0prune.cost.measures.counts import Count, Macs, Params, Width
from l0prune.cost.measures.latency import Latency
from l0prune.cost.measures.registry import kind_of, measure_of, names, register
from l0prune.cost.measures.terms import SumOfTerms

__all__ = [
    "Amounts",
    "Count",
    "Latency",
    "Macs",
    "Measure",
    "Params",
    "Source",
    "SumOfTerms",
    "Width",
    "kind_of",
    "measure_of",
    "names",
    "register",
]
