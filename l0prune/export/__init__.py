"""Export: fold the gates, slice the network, prove it, write it."""

from l0prune.export.api import Export, export
from l0prune.export.certificate import Certificate, Check

__all__ = ["Certificate", "Check", "Export", "export"]
