"""Export: fold the gates, slice the network, prove it, write it."""

from l0prune.export.api import export
from l0prune.export.certificate import Certificate, Check
from l0prune.export.result import Export

__all__ = ["Certificate", "Check", "Export", "export"]
