"""Each private name of torch that l0prune uses still means what it is used for."""

import contextlib
import copy
import importlib
import logging
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

from l0prune.capture import compat

ATEN = torch.ops.aten


class Relu(nn.Module):
    def forward(self, x):
        return x.relu()


@pytest.fixture(scope="module")
def program():
    return export(Relu(), (torch.randn(3, 4),), dynamic_shapes=({0: Dim("rows")},))


def test_operator_and_fake_tensor_classes_are_those_of_a_captured_graph(program):
    (call,) = [n for n in program.graph.nodes if n.op == "call_function"]
    assert isinstance(call.target, compat.OpOverload)
    assert isinstance(call.meta["val"], compat.FakeTensor)


def test_a_symbolic_size_has_a_hint_and_an_expression(program):
    (placeholder,) = program.graph.find_nodes(op="placeholder")
    rows, columns = placeholder.meta["val"].shape
    assert (compat.size_hint(rows), compat.size_hint(columns)) == (3, 4)
    assert not compat.size_expression(rows).is_number
    assert compat.size_expression(columns) == 4


class Chosen(nn.Module):
    def forward(self, x):
        return x[x > 0].repeat(2)


def test_a_size_that_depends_on_data_has_a_number_once_it_is_bounded():
    graph = export(Chosen(), (torch.randn(3, 4),)).graph
    chosen, twice = (graph.find_nodes(op="call_function", target=t) for t in
                     (ATEN.index.Tensor, ATEN.repeat.default))  # fmt: skip
    (size,), (double,) = (node.meta["val"].shape for (node,) in (chosen, twice))
    assert (compat.size_hint(size), compat.size_hint(double)) == (None, None)
    compat.bound_sizes(double, 7)  # no size by itself
    assert compat.size_hint(double) is None
    compat.bound_sizes(size, 12)
    assert (compat.size_hint(size), compat.size_hint(double)) == (12, 24)


def test_schema_says_what_an_operator_writes():
    assert compat.schema_of(ATEN.relu_.default).is_mutable
    assert not compat.schema_of(ATEN.relu.default).is_mutable
    assert compat.schema_of(len) is None


def test_version_counts_writes():
    tensor = torch.zeros(2)
    before = compat.version_of(tensor)
    tensor.add_(1)
    assert compat.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert compat.version_of(torch.zeros(2)) is None


def test_functorch_is_active_within_its_transforms_alone():
    seen = []

    def note(x):
        seen.append(compat.functorch_is_active())
        return x

    torch.func.vmap(note)(torch.zeros(2))
    assert seen == [True]
    assert not compat.functorch_is_active()


def test_a_dispatch_mode_sees_each_operator():
    class Seen(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    names = []
    with Seen():
        torch.zeros(2).relu()
    assert ATEN.relu.default in names


def test_below_autograd_views_of_parameters_are_as_a_dispatch_mode_may_return_them():
    weight = nn.Parameter(torch.zeros(2, 3))

    class Elsewhere(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with ThreadPoolExecutor(1) as other:
                return other.submit(self.run, func, args, kwargs or {}).result()

        def run(self, func, args, kwargs):
            with compat.below_autograd():
                return func(*args, **kwargs)

    with torch.no_grad(), Elsewhere():
        assert weight.t().shape == (3, 2)


def test_subclasses_are_plain_without_torch_function():
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("called")

    loud = torch.zeros(2).as_subclass(Loud)
    with compat.without_torch_function():
        assert type(loud.relu()) is Tensor


def test_a_shell_has_shape_strides_and_dtype_but_no_memory():
    class Empty(Tensor):
        __torch_function__ = compat.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            called.append(func)
            return torch.ones(())

    called = []
    shell = compat.shell(Empty, torch.zeros(2, 3).T, torch.float64)
    assert (shell.shape, shell.stride(), shell.dtype) == ((3, 2), (1, 3), torch.float64)
    assert shell.sum() == 1
    assert called[0] is ATEN.sum.default


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_a_convolution_takes_another_weight_and_pads_as_it_does(mode):
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    x, weight = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    found = compat.convolve(layer, x, weight, layer.bias)
    layer.weight = nn.Parameter(weight)
    assert torch.equal(found, layer(x))


def test_only_classes_that_compute_as_torch_are_standard_convolutions():
    class Own(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight * 2, bias)

    class Named(nn.Conv2d):
        pass

    assert compat.standard_convolution(Named, nn.Conv2d)
    assert not compat.standard_convolution(Own, nn.Conv2d)
    assert not compat.standard_convolution(nn.Linear, nn.Conv2d)


@pytest.mark.parametrize(
    "place",
    [
        compat.CAUSAL_MASK, compat.EXPORTER_LOG, compat.SIZE_ASKED, compat.SIZE_FIXED,
        compat.STACK_OF_A_NODE,
    ],
)  # fmt: skip
def test_functions_that_are_replaced_are_there(place):
    owner, name = place
    before = getattr(owner, name)
    with compat.replaced(owner, name, None):
        assert getattr(owner, name) is None
    assert getattr(owner, name) is before


def test_torch_says_where_it_asks_about_a_size_and_where_it_fixes_one():
    class Fixing(nn.Module):
        def forward(self, x):
            return x + 1 if x.shape[0] == 3 else x

    said = {}

    def noted(place):
        method = getattr(*place)

        def call(env, *args, **kwargs):
            said[place] = args
            return method(env, *args, **kwargs)

        return compat.replaced(*place, call)

    with noted(compat.SIZE_ASKED), noted(compat.SIZE_FIXED):
        export(Fixing(), (torch.randn(3, 4),), dynamic_shapes=({0: Dim.AUTO},))
    assert said[compat.SIZE_ASKED][1].free_symbols
    assert said[compat.SIZE_FIXED][1] == 3


def test_nodes_get_the_stack_that_torch_gives_them(program):
    (expected,) = [
        node.stack_trace
        for node in program.graph.find_nodes(op="call_function", target=ATEN.relu.default)
    ]
    with compat.replaced(*compat.STACK_OF_A_NODE, compat.CallStack):
        other = export(Relu(), (torch.randn(3, 4),)).graph
    (found,) = other.find_nodes(op="call_function", target=ATEN.relu.default)
    assert found.stack_trace == expected
    assert "return x.relu()" in expected


def test_torch_gathers_records_of_a_capture_as_long_as_its_trace_log_has_a_handler(monkeypatch):
    handler, found = logging.Handler(), []
    monkeypatch.setattr(handler, "emit", found.append)
    monkeypatch.setattr(logging.getLogger(compat.TRACE_LOG), "handlers", [handler])
    export(Relu(), (torch.randn(3, 4),))
    assert found


def test_the_exporter_gets_its_operators_where_they_are_kept(program, monkeypatch):
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    assert callable(registry.from_torchlib)
    asked = []
    monkeypatch.setattr(registry, "from_torchlib", lambda **which: asked.append(which) or "none")
    with compat.one_onnx_registry():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="'str' object"):  # for it is no registry
                torch.onnx.export(program, dynamo=True, verbose=False)
        assert len(asked) == 1
    registry.from_torchlib()
    assert len(asked) == 2
    # Which operators torchvision brings is known once it is loaded.
    modules = dict(sys.modules)
    monkeypatch.setattr(sys, "modules", modules)
    has_torchvision = modules.pop("torchvision", None) is not None
    modules |= {} if has_torchvision else {"torchvision": torch}
    for _ in range(2):
        with compat.one_onnx_registry():
            registry.from_torchlib()
        assert len(asked) == 3


class Promoting(nn.Module):
    """Integers and numbers beside floats, and a layer that needs no promotion."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        places = torch.arange(4)
        return self.layer(x).relu() + x * 2 + x / places.add(1) + places.div(3).pow(2)


def test_promotion_is_as_it_was_and_looks_at_fewer_nodes(monkeypatch):
    given = torch.export.export(Promoting().eval(), (torch.randn(2, 4),), strict=False)
    run, seen, files = torch.fx.Interpreter.run_node, [], []
    monkeypatch.setattr(
        torch.fx.Interpreter, "run_node", lambda self, node: [seen.append(node), run(self, node)][1]
    )
    for context in (contextlib.nullcontext(), compat.quick_promotion()):
        seen.clear()
        with compat.one_onnx_registry(), context:
            made = torch.onnx.export(given, dynamo=True, verbose=False, optimize=False)
        values = [
            value.const_value.numpy().tolist() for value in made.model.graph.initializers.values()
        ]
        files.append(([str(node) for node in made.model.graph], values, len(seen)))
    (nodes, values, every), (quick_nodes, quick_values, some) = files
    assert (nodes, values) == (quick_nodes, quick_values)
    assert any("Cast" in node for node in nodes)
    assert some < every


def test_a_file_is_rewritten_as_before_with_fewer_looks(monkeypatch):
    import onnx
    import onnx_ir
    from onnxscript.optimizer import optimize_ir
    from onnxscript.rewriter import _matcher

    starts = [
        onnx.helper.make_tensor(f"n{n}" if n else "one", onnx.TensorProto.INT64, [1], [value])
        for n, value in (("0", 0), ("1", 2), ("2", 4), ("", 1))
    ]
    nodes = [onnx.helper.make_node("Relu", ["x"], ["y0"])]
    for n in range(20):  # pairs of slices of one value, of which a split can be made, and others
        old, ends = f"y{n}", ("n1",) if n % 2 else ("n1", "n2")
        for part, end in reversed([*enumerate(ends)]):  # onnxscript takes the first that fits
            given = [old, f"n{part}", end, "one"]
            nodes.append(onnx.helper.make_node("Slice", given, [f"p{n}.{part}"]))
        nodes.append(
            onnx.helper.make_node(
                "Concat", [f"p{n}.0", f"p{n}.{len(ends) - 1}"], [f"y{n + 1}"], axis=1
            )
        )
    given, result = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4])
        for name in ("x", "y20")
    )
    graph = onnx.helper.make_graph(nodes, "slices", [given], [result], starts)
    made = onnx.helper.make_model(graph)
    look, looks, files = _matcher.SimplePatternMatcher._multi_match, [], []
    monkeypatch.setattr(
        _matcher.SimplePatternMatcher,
        "_multi_match",
        lambda self, *given, **how: [looks.append(given), look(self, *given, **how)][1],
    )
    for context in (contextlib.nullcontext(), compat.quick_rewrites()):
        looks.clear()
        model = onnx_ir.from_proto(made)
        with context:
            optimize_ir(model)
        files.append(([str(node) for node in model.graph], len(looks)))
    (nodes, every), (quick_nodes, some) = files
    assert nodes == quick_nodes
    assert any("Split" in node for node in nodes)
    assert some < every / 2


def test_numbers_near_0_and_1_stay_in_files():
    import onnx
    import onnx_ir
    from onnxscript.optimizer import optimize_ir

    numbers = {"least": 1e-9, "near": 1 - 1e-6, "zero": 0.0, "one": 1.0}
    arrays = [
        onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [], [value])
        for name, value in numbers.items()
    ]
    nodes = [
        onnx.helper.make_node("Add", ["x", "least"], ["a"]),
        onnx.helper.make_node("Mul", ["a", "near"], ["b"]),
        onnx.helper.make_node("Add", ["b", "zero"], ["c"]),
        onnx.helper.make_node("Mul", ["c", "one"], ["y"]),
    ]
    given, result = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4]) for name in "xy"
    )
    graph = onnx.helper.make_graph(nodes, "numbers", [given], [result], arrays)
    model = onnx_ir.from_proto(onnx.helper.make_model(graph))
    with compat.exact_numbers():
        optimize_ir(model)
    assert [node.op_type for node in model.graph if node.op_type != "Identity"] == ["Add", "Mul"]


def test_an_attribute_that_torch_lacks_is_not_replaced():
    with compat.replaced(nn.Linear, "no_such_method", None):
        assert not hasattr(nn.Linear, "no_such_method")


def test_a_graph_calls_a_hook_on_each_copy(program):
    graph, copies = program.module(), []
    compat.on_copy(graph, copies.append)
    assert copies == [copy.deepcopy(graph)]


def test_what_a_graph_preserves_goes_along_with_copies(program):
    graph = program.module()
    graph.meta[compat.PRESERVED] = {"mark": "here"}
    assert copy.deepcopy(graph).mark == "here"


def test_many_tensors_are_averaged_and_copied_at_once():
    averages, values = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.zeros(3)]
    compat.average_(averages, values, 0.25)
    assert [a.tolist() for a in averages] == [[0.25] * 2, [0.75] * 3]
    compat.copy_all_(averages, values)
    assert all(map(torch.equal, averages, values))


def test_whole_numbers_get_to_a_device_exactly():
    values = [2**62 + 1, 2**53 + 1, 0, 7]
    assert compat.filled(values, torch.device("cpu")).tolist() == values


def test_torch_takes_operators_apart_on_fake_tensors():
    recipes = compat.core_aten_decompositions()
    with compat.enable_python_dispatcher():
        graph = make_fx(ATEN.addcmul.default, recipes, "fake")(*torch.randn(3, 2))
    assert ATEN.addcmul.default not in [n.target for n in graph.graph.nodes]


def test_the_compiler_leaves_out_what_is_marked():
    seen = []

    @compat.without_compiler
    def outside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: outside(x) * 2, backend="eager")
    assert compiled(torch.ones(())).item() == 4
    assert seen == [False]


def test_the_compiler_calls_what_is_constant_while_it_traces():
    seen = []

    @compat.constant_for_compiler
    def number():
        seen.append(torch.compiler.is_compiling())
        return 3

    compiled = torch.compile(lambda x: x * number(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(())).item() for _ in range(2)] == [3, 3]
    assert len(seen) == 1


def test_ddp_leaves_tensors_alone_and_the_first_process_to_set_a_key_wins(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        assert compat.first_to_set("key", "mine") == "mine"
        assert compat.first_to_set("key", "other") == "mine"
        module = nn.Linear(2, 2)
        compat.leave_to_ddp(module, ["bias"])
        wrapped = nn.parallel.DistributedDataParallel(module)
        assert wrapped.parameters_to_ignore == {"bias"}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d]
)
def test_norm_base(kind):
    assert issubclass(kind, compat.NormBase)
    assert {"weight", "running_mean"} <= vars(kind(3, affine=True, track_running_stats=True))[
        "_parameters"
    ].keys() | vars(kind(3, affine=True, track_running_stats=True))["_buffers"].keys()


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose3d])
def test_convolution_base(kind):
    layer = kind(2, 4, 3, groups=2)
    assert isinstance(layer, compat.ConvolutionBase)
    assert (layer.groups, layer.transposed) == (2, kind is nn.ConvTranspose3d)


def test_hooks_before_a_forward_are_seen():
    module = nn.Linear(2, 2)
    assert not compat.has_pre_hooks(module)
    module.register_forward_pre_hook(lambda *_: None)
    assert compat.has_pre_hooks(module)


def test_a_program_lets_go_of_a_parameter():
    made = export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    compat.drop_from_state(made, "bias")
    assert list(made.state_dict) == ["weight"]


def test_transformers_names_attention_and_auto_classes():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=5, n_positions=4)
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config)
    assert compat.attention_of(model) == "eager"
    assert "AutoModelForCausalLM" in compat.auto_classes(model)
    assert compat.attention_of(nn.Linear(2, 2)) is None


def test_pytree_takes_nested_inputs_apart_and_puts_them_together():
    given = ({"a": 1, "b": [2, (3, None)]}, 4)
    leaves, spec = compat.pytree.tree_flatten(given)
    assert leaves == compat.pytree.tree_leaves(given) == [1, 2, 3, None, 4]
    assert compat.pytree.tree_unflatten(leaves, spec) == given
    assert isinstance(spec, compat.pytree.TreeSpec)
    assert spec == compat.pytree.tree_structure(given)
    assert compat.pytree.tree_map_only(int, lambda n: n + 1, given)[0]["b"] == [3, (4, None)]
    assert dict in compat.pytree.SUPPORTED_NODES
    assert dict in compat.pytree.BUILTIN_TYPES


def test_keep_guards_drops_conditions_that_do_not_hold():
    program = export(nn.Linear(3, 2), (torch.randn(4, 3),), dynamic_shapes=((Dim("n"), None),))
    assert isinstance(program._guards_code, list)
    holds = "L['input'].ndim == 2"
    program._guards_code = [holds, "L['input'].size()[0] % 2 == 0"]
    compat.keep_guards(program, {"L": {"input": torch.randn(3, 3)}, "torch": torch})
    assert program._guards_code == [holds]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_base(kind):
    assert issubclass(kind, compat.BatchNormBase)
    assert not issubclass(nn.InstanceNorm2d, compat.BatchNormBase)


def test_hooks_on_saved_tensors_are_seen():
    assert not compat.has_saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert compat.has_saved_tensor_hooks()
    assert not compat.has_saved_tensor_hooks()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_tracers_are_seen():
    seen = []

    def forward(x):
        seen.append(compat.is_recorded())
        return x + 1

    assert not compat.is_recorded()
    make_fx(forward)(torch.ones(2))
    torch.jit.trace(forward, torch.ones(2), check_trace=False)
    with FakeTensorMode():
        forward(torch.ones(2))
    assert seen
    assert all(seen)


def test_graphs_are_copied_without_a_warning(program):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compat.quiet_copies():
            copy.deepcopy(program.module())
            copy.deepcopy(program)


def test_compiled_code_can_run_as_it_was_written():
    seen = []

    def watched(graph, _):
        seen.append(graph)
        return graph

    compiled = torch.compile(lambda x: x + 1, backend=watched)
    with compat.uncompiled():
        compiled(torch.ones(2))
    assert not seen
    compiled(torch.ones(2))
    assert len(seen) == 1


def test_what_fully_shard_did_to_modules_is_undone(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        before = [(type(m), sorted(vars(m))) for m in model.modules()]
        for _ in range(2):  # what is undone can be done again
            fully_shard(model[0])
            fully_shard(model)
            model(torch.ones(1, 2)).sum().backward()
            compat.unshard_modules(model)
            for module in model.modules():
                hooks = (vars(module)[name] for name in vars(module) if name.endswith("_hooks"))
                assert not any(hooks)
                for name, shard in module._parameters.items():
                    module._parameters[name] = nn.Parameter(shard.full_tensor().detach())
            assert [(type(m), sorted(vars(m))) for m in model.modules()] == before
        copy.deepcopy(model)
    finally:
        torch.distributed.destroy_process_group()


def test_the_exporter_asks_what_replaces_operators_without_translation():
    given = torch.export.export(Relu(), (torch.randn(2, 4),), strict=False)
    asked = []

    def replace(program, translated, table):
        asked.append((ATEN.relu.default in translated, ATEN.relu_.default in table))

    with compat.replacing_operators(replace):
        made = torch.onnx.export(given, dynamo=True, verbose=False)
    assert asked == [(True, True)]
    assert [node.op_type for node in made.model.graph] == ["Relu"]


def test_operators_that_are_made_of_others():
    assert compat.is_composite(ATEN.flatten.using_ints)
    assert not compat.is_composite(ATEN.relu.default)


def test_composite_operators_keep_symbols_of_sizes_in_calls(program):
    (given,) = program.graph.find_nodes(op="placeholder")
    value = given.meta["val"]
    with value.fake_mode, compat.enable_python_dispatcher():
        found = ATEN.flatten.using_ints(value)
    assert "s" in str(found.shape[0])


def test_tensors_in_one_memory_are_told_from_copies(program):
    (given,) = program.graph.find_nodes(op="placeholder")
    for value in (torch.randn(3, 4), given.meta["val"]):
        assert compat.memory_of(value) == compat.memory_of(value.t())
        assert compat.memory_of(value) != compat.memory_of(value.clone())
