"""Fourteen more reports of users, and the small networks that stand for what they wrote of.

Each is a thread's number, and what it is about in a sentence; what l0prune does with a network of
that kind, shown by a test; and the network (``benchmarks.report_models``) that is cut for the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report_models as make


@dataclass(frozen=True)
class Report:
    """A row of the table.

    Attributes:
        situation: what users met, or asked for.
        answer: what l0prune does with such a network.
        test: the name of a test that shows it.
        build: makes the network, given a folder for files that it is read from.
        run: how it is cut, see ``benchmarks.report_steps``.
        also: what is measured beside, see there.
        options: of ``l0prune.gate``; or of ``shrink_experts`` where experts go.
    """

    situation: str
    answer: str
    test: str
    build: make.Build
    run: str = "scrambled"
    also: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


HERE = "test_the_network_of_a_report_is_cut"

REPORTS = {
    "Model-Optimizer 1792": Report(
        "of a model of images and text the language model alone is to be cut; it shares its hidden "
        "size with the projector",
        "`include=` gates its heads and neurons alone; the hidden size, which the model also "
        "returns as features of images, stays whole with that reason",
        "test_a_model_that_installs_hooks_at_its_first_call_is_as_it_was",
        make.llava,
        also="tower",
        options={"include": "*language_model*", "branches": False},
    ),
    "ExecuTorch 5068": Report(
        "a model that writes to a buffer of its own cannot be exported",
        "the buffer is cut with its channels, and an input and an output of the ONNX file",
        "test_a_buffer_becomes_an_input_and_an_output",
        make.loudness,
        also="stream",
    ),
    "Torch-Pruning 515": Report(
        "the hidden size of a GRU depends on itself; streams keep the past of a convolution",
        "hidden units are an axis, and what is kept from call to call is cut with it",
        "test_state_of_a_submodule_and_an_input_by_name",
        make.frames,
        also="stream",
    ),
    "OnnxSlim 135": Report(
        "one initializer has several readers, as an embedding that is the head, too",
        "it is one parameter, counted once, and in the smaller file once",
        "test_a_weight_of_several_readers_stays_one_parameter",
        make.tied_table,
        also="stored",
    ),
    "Model-Optimizer 2159": Report(
        "DeepSeek's latent attention: low ranks of queries, and of keys and values",
        "ranks, heads and their parts are axes of their own",
        HERE,
        make.deepseek,
    ),
    "Model-Optimizer 1814": Report(
        "Nemotron Nano 3: Mamba, attention and experts in one network",
        "widths of all three are cut; axes are tried before training, and one that fails stays "
        "whole with a reason",
        HERE,
        make.nemotron,
    ),
    "LLM-Shearing 74": Report(
        "a Llama is to have exactly the sizes that are given, and to load as an ordinary Llama",
        '`loadable_by="transformers"` and budgets such as `heads=6`',
        "test_heads_need_to_divide_the_width_that_is_left",
        make.llama,
        "sized",
        also="sizes",
    ),
    "llm-compressor 2828": Report(
        "experts go by REAP where a bias corrects the router's scores",
        "`shrink_experts` cuts the bias with its experts, wherever it is held",
        "test_a_bias_beside_the_router_is_cut_with_it",
        make.minimax,
        "fewer_experts",
        options={"experts": 5},
    ),
    "llm-compressor 2864": Report(
        "experts go by REAP where a router chooses groups first; the configuration has to agree",
        "groups keep equally many, and the configuration says the new number",
        "test_groups_keep_equally_many",
        make.grouped_experts,
        "fewer_experts",
        options={"experts": 12},
    ),
    "onnxsim 1012": Report(
        "weights are in the branches of an If whose condition is constant",
        "the branch that is never taken is gone, the other one is cut",
        "test_branches_of_a_condition_that_is_always_the_same_are_folded",
        make.constant_if,
    ),
    "Torch-Pruning 411": Report(
        "a ViT of transformers is pruned step by step, trained in between",
        "each result is cut again, and the last files fit the original class",
        "test_the_file_of_the_last_cut_fits_the_original",
        make.vit,
        "in_rounds",
    ),
    "Torch-Pruning 104": Report(
        "graph attention: heads over edges",
        "heads are found where their products are summed over edges",
        "test_export_is_exact",
        make.graph_attention,
    ),
    "Torch-Pruning 136": Report(
        "a trainer's checkpoint is frozen and in half precision: 0 parameters, nothing cut",
        "it is counted and cut all the same; a training says that all weights are frozen",
        "test_frozen_weights_are_reported_where_they_were_to_learn",
        make.frozen_half,
        also="counted",
    ),
    "peft 1746": Report(
        "LoRA is trained on a pruned model; loaded again, it has to have its effect",
        "layers that are cut are layers of torch to peft; an adapter loads and merges",
        "test_adapters_merge_where_a_branch_is_gone",
        make.llama,
        also="adapter",
        options={"branches": False},
    ),
}
