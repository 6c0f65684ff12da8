"""State of a program: tensors that carry values from one call to the next, as a running mean does.

A file has no memory. In ONNX the state becomes inputs and outputs: a call is given the state that
the call before returned, and the first one the values that the program starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Node

from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import examples_in
from l0prune.capture.provenance import within
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import Answer, output_of
from l0prune.exporting.certify.certificate import TOLERANCE
from l0prune.exporting.certify.difference import comparable, difference
from l0prune.exporting.certify.dtypes import dtype_of, lent, name_of
from l0prune.exporting.onnx.operators import around_its_tensors
from l0prune.infer.dataflow import carried
from l0prune.plan.globs import listed

Run = Callable[[list[Tensor]], list[Tensor]]


def state_of(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the tensors that carry values from one call to the next, by name."""
    values = {**program.constants, **program.state_dict}
    return {name: values[name].detach() for name in _carriers(program).values()}


def _carriers(program: ExportedProgram) -> dict[Node, str]:
    """Return the placeholders of the state, each with its name in the model."""
    specs = program.graph_signature.input_specs
    names = {spec.arg.name: spec.target for spec in specs if spec.target is not None}
    nodes = program.graph.find_nodes(op="placeholder")
    stored = {node: names[node.name] for node in nodes if node.name in names}
    return {node: stored[node] for node in carried(program.graph, stored)}


def with_state(program: ExportedProgram) -> ExportedProgram:
    """Return a program that takes its state as last inputs and returns it as last outputs.

    The program itself where it has no state.
    """
    if not _carriers(program):
        return program
    result = around_its_tensors(program)
    graph, signature = result.graph, result.graph_signature
    state, last = _carriers(result), graph.find_nodes(op="placeholder")[-1]
    for node in state:
        if node is not last:
            last.append(node)
            last = node
    values = state_of(program)
    final = [_written_apart(node) for node in state]
    output = graph.output_node()
    output.args = ((*output.args[0], *final),)  # type: ignore[misc]
    given, returned = ([TensorArgument(n.name) for n in nodes] for nodes in (state, final))
    names = {arg.name for arg in given}
    signature.input_specs = [spec for spec in signature.input_specs if spec.arg.name not in names]
    signature.input_specs += [InputSpec(InputKind.USER_INPUT, arg, None) for arg in given]
    signature.output_specs += [OutputSpec(OutputKind.USER_OUTPUT, arg, None) for arg in returned]
    _describe(result, {n.name: values[name] for n, name in state.items()})
    result.graph_module.recompile()
    return result


def _written_apart(node: Node) -> Node:
    """Return a copy of an input that the graph reads and writes in its place, at its end."""
    graph = node.graph
    with graph.inserting_before(next(each for each in graph.nodes if each.op != "placeholder")):
        result = graph.call_function(torch.ops.aten.clone.default, (node,))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    return result


def _describe(program: ExportedProgram, state: Mapping[str, Tensor]) -> None:
    """Add the state to the structures of the program's inputs, by name, and outputs."""
    called = program.module_call_graph[0].signature
    assert called is not None
    args, kwargs = pytree.tree_unflatten([0] * called.in_spec.num_leaves, called.in_spec)
    called.in_spec = pytree.tree_structure((args, {**kwargs, **dict.fromkeys(state, 0)}))
    leaves = [pytree.treespec_leaf() for _ in state]
    called.out_spec = pytree.treespec_tuple([called.out_spec, *leaves])
    if called.forward_arg_names is not None:
        called.forward_arg_names = [*called.forward_arg_names, *state]
    if program.example_inputs is not None:
        given, by_name = program.example_inputs
        program.example_inputs = (given, {**by_name, **state})


class Carrying:
    """File of a network with state, run call after call: each gets the state that the last gave."""

    def __init__(self, run: Run, state: Mapping[str, Tensor]) -> None:
        self._run, self._state = run, [*state.values()]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs without the state."""
        found = self._run([*inputs, *self._state])
        count = len(found) - len(self._state)
        self._state = found[count:]
        return found[:count]


def check_stateless(program: ExportedProgram, what: str, path: str) -> None:
    """Raise CertificateError for a program with state, of which ``what`` was to be written.

    ``path`` is that of the submodule that the program is of.
    """
    if names := [within(path, name) for name in state_of(program)]:
        raise CertificateError(
            f"No {what} was written: each call of the model changes {listed(names)}, the next one "
            "computes with that, and such a file does not keep it. Make it an input and an output "
            "of the forward. The ONNX file that save_onnx writes of a model captured as a whole "
            "does so by itself, and a program of torch keeps it: --pt2 (Export.save)."
        )


def attributes_kept(module: nn.Module, answers: Sequence[Answer]) -> tuple[str, ...]:
    """Return the attributes by which the module's second call differs from its first, if it does.

    It is called on the fewest examples. A program without state answers both calls alike: in
    float32 to the bit, or else a float64 comparison decides.
    """
    fewest = min((answer.inputs for answer in answers), key=examples_in)
    exact = answers[0].dtypes[0]
    allowed = {exact: TOLERANCE[name_of(exact)]}
    if dtype_of(module) != exact:
        allowed = {torch.float32: 0.0, **allowed}
    for dtype, error in allowed.items():
        model = lent(module, dtype)
        before = [(path, each, dict(vars(each))) for path, each in model.named_modules()]
        first, second = (comparable(output_of(model, fewest, dtype)) for _ in range(2))
        if not difference(first, second) > error:  # nan is no difference
            return ()
    changed = [
        within(path, name)
        for path, each, held in before
        for name, value in vars(each).items()
        if held.get(name) is not value
    ]
    return (*changed,) or ("something outside of its modules",)


def lost(names: Sequence[str]) -> str:
    """Describe attributes that carry values from one call to the next, as no program does."""
    return (
        "called twice on the same inputs, the model gives two answers, since it keeps "
        f"{listed(names)}, which is no buffer. Register it as one (register_buffer): programs keep "
        "buffers, and an ONNX file has them as inputs and outputs."
    )


def check_kept(names: Sequence[str], what: str) -> None:
    """Raise CertificateError if attributes carry values from one call to the next."""
    if names:
        raise CertificateError(f"No {what} was written: {lost(names)}")
