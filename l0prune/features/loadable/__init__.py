"""Cuts that transformers and vLLM load without l0prune: ``gate(…, loadable_by="vllm")``."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, functions={"loadable": "plans", "write_for_vllm": "vllm"})
