"""The walk over a captured graph: one rule per node, with records of reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from l0prune.capture.capture import Captured
from l0prune.capture.provenance import module_of
from l0prune.infer.nodes import (
    IDENTITIES,
    PERMUTATIONS,
    PIECES,
    RESHAPES,
    called,
    dim_order,
    draws,
    has_statistics,
    has_tensor,
    hint,
    is_pointwise,
    may_view,
    norm_dim,
    operator_name,
    shape_of,
    standardised,
    valued,
    written,
)
from l0prune.infer.registry import RULES, NotFollowed, Value, failure, registered
from l0prune.infer.rules.pointwise import pointwise  # its package fills the registry
from l0prune.infer.solver import COPIES, Expr, Solver, Var, variables
from l0prune.plan.layout import Const

Place = tuple[str, int]  # a tensor's name and a dim of it


@dataclass(frozen=True, slots=True)
class Read:
    """An axis contracted away by ``node``; ``place`` is the weight dim, if a weight reads it.

    ``why`` describes for messages what the node does to the axis. ``stays`` is for a norm, which
    reads an axis that its output has, too.
    """

    expr: Expr
    node: Node
    place: Place | None
    operands: tuple[Node, ...]
    why: str
    stays: bool


@dataclass(frozen=True, slots=True)
class Write:
    """An axis produced by ``node`` from the rows of a weight (or its bias)."""

    expr: Expr
    node: Node
    place: Place


@dataclass(frozen=True, slots=True)
class Computed:
    """A dim of a weight that the forward computes, for example a sum of two parameters.

    ``is_written`` where ``node`` produces the dim with the weight's rows, and does not contract it.
    """

    expr: Expr
    node: Node
    weight: Node
    where: str
    is_written: bool


@dataclass(frozen=True, slots=True)
class Mixed:
    """A contraction of kernels with their shares, which are all computed whatever is cut.

    Attributes:
        shares: name of the node with the shares.
        shares_dim: the contracted dim of ``shares``.
        kernels: name of the stored operand.
        kernels_dim: the contracted dim of ``kernels``, a separate axis.
    """

    shares: str
    shares_dim: int
    kernels: str
    kernels_dim: int


@dataclass(slots=True)
class Work:
    """Multiply-accumulates of one node for one example: ``scale × Π sizes`` of dims."""

    node: Node
    owner: str
    scale: float
    dims: tuple[Expr, ...]
    places: tuple[Place, ...] = ()
    tensor: str = ""  # the parameter that is multiplied with, if one is


@dataclass
class Inference:
    """Facts about a captured graph, gathered while rules run over it.

    ``values`` holds for each node one expression per dim of its tensor; ``tensors`` the same
    for each parameter, buffer and constant by its name; ``unreached`` a reader of each
    that is read where no gate acts. The forward gets those ``by_name`` by named_parameters().
    """

    captured: Captured
    by_name: tuple[str, ...] = ()
    unreached: Mapping[str, Node] = field(default_factory=dict)
    solver: Solver = field(default_factory=Solver)
    values: dict[Node, Value] = field(default_factory=dict)
    tensors: dict[str, tuple[Expr, ...]] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    kinds: list[tuple[Expr, str]] = field(default_factory=list)
    names: list[tuple[Expr, str]] = field(default_factory=list)
    wider: list[tuple[Expr, Expr]] = field(default_factory=list)
    picks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by name of the node
    # by contraction and operand, the operand's dim that the result keeps
    carried: dict[tuple[Node, Node], int] = field(default_factory=dict)
    closed: dict[str, frozenset[str]] = field(default_factory=dict)  # see ``Analysis``
    mixed: dict[str, Mixed] = field(default_factory=dict)  # by name of the node
    # by node and dim of kernels whose other dims are regrouped, the parameter and its dim
    kernels: dict[tuple[Node, int], Place] = field(default_factory=dict)
    failed: dict[Node, str] = field(default_factory=dict)  # reasons of failed zero rules
    copies_of_results: list[Var] = field(default_factory=list)
    _from_inputs: set[Node] = field(default_factory=set)

    def run(self) -> None:
        """Apply one rule to each node, in order."""
        for node in self.captured.graph.nodes:
            self.solver.node = node
            if node.name in self.captured.inputs or any(
                operand in self._from_inputs for operand in valued(node)
            ):
                self._from_inputs.add(node)
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                for operand in node.all_input_nodes:
                    self.pin_all(operand, f"it feeds {self._whose} output")
        for dim in self.copies_of_results:
            met = self.solver.resolve(dim)
            if isinstance(met, Var) and met.copies:
                met.binding = Const(met.size, COPIES)

    @property
    def _whose(self) -> str:
        return f"{self.captured.path}'s" if self.captured.path else "the model's"

    def _placeholder(self, node: Node) -> Value:
        shape = shape_of(node)
        if shape is None:
            return None
        name = self.captured.names.get(node.name)
        if node.name in self.captured.memory:  # state that the model keeps, which is cut with it
            return tuple(self.solver.fresh(size) for size in shape)
        if name is None:
            what = f"dimension {{}} of {self._whose} input {node.name!r}"
            return tuple(Const(s, what.format(i), True) for i, s in enumerate(shape))
        if name not in self.tensors:
            self.tensors[name] = tuple(self.solver.fresh(size) for size in shape)
        return self.tensors[name]

    def _call(self, node: Node) -> Value:
        name = operator_name(node.target)
        if draws(node):
            why = f"eval mode draws random numbers for it ({called(node)}): a cut would draw others"
            for operand in node.all_input_nodes:
                self.pin_all(operand, why)
        known = registered(name)
        if known is None and not is_pointwise(node.target):
            return self._unfollowed(
                node,
                f"operator {called(node)} is unknown to l0prune; a rule for it takes ten lines, "
                f'@l0prune.infer.registry.rule("{name}"): see docs/extending.md, '
                "'A rule for a new operator'",
            )
        try:
            return RULES[known](self, node) if known else pointwise(self, node)
        except NotFollowed as error:
            return self._unfollowed(node, f"{called(node)} cannot be followed here: {error}")
        except Exception as error:
            return self._unfollowed(node, failure("rule", node, error))

    def _unfollowed(self, node: Node, why: str) -> Value:
        """Pin the operands of a call that no rule covers; its value is opaque."""
        if not has_tensor(node):
            return None
        for operand in node.all_input_nodes:
            self.pin_all(operand, why)
        return self.opaque(node, f"a result of operator {called(node)}, which is not followed")

    # --- what rules use -------------------------------------------------------------------

    def dims(self, node: Node) -> tuple[Expr, ...]:
        """One resolved expression per dim of a tensor node."""
        value = self.values[node]
        assert isinstance(value, tuple), f"{node} is no single tensor"
        return tuple(self.solver.resolve(dim) for dim in value)

    def pin_all(self, node: Node, text: str) -> None:
        """Pin every dim of a node's value."""
        value = self.values.get(node)
        for dims in value if isinstance(value, list) else [value or ()]:
            for dim in dims:
                self.solver.pin(dim, text)

    def opaque(self, node: Node, what: str) -> Value:
        """Return a value of constants with the node's shape."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return tuple(Const(hint(size), what) for size in value.shape)
        if isinstance(value, tuple | list):
            tensors = [v for v in value if isinstance(v, Tensor)]
            return [tuple(Const(hint(s), what) for s in v.shape) for v in tensors]
        return None

    def place(self, node: Node, dim: int) -> Place | None:
        """Return the parameter and its dim that a dim of the node is, or is a piece of."""
        if (node, dim) in self.kernels:
            return self.kernels[node, dim]
        while node.op == "call_function":
            source = node.args[0] if node.args else None
            name = operator_name(node.target)
            if not isinstance(source, Node):
                return None
            if name in PERMUTATIONS:
                order = dim_order(node, len(shape_of(source) or ()))
                dim = order[dim]
            elif name == "aten._weight_norm" and dim == norm_dim(node):
                source = node.args[1]  # a slice is as large as g says
                if not isinstance(source, Node):
                    return None
            elif dim == 0 and (weight := standardised(node)) is not None:
                source = weight  # its rows
            elif name in RESHAPES:
                if shape_of(node) != shape_of(source):
                    return None
            elif name not in IDENTITIES and name not in PIECES:
                return None
            node = source
        return (self.captured.names[node.name], dim) if self.is_parameter(node) else None

    def whole_place(self, node: Node, dim: int) -> Place | None:
        """Return the parameter and its dim that a dim of the node is as a whole, else None."""
        place = self.place(node, dim)
        is_whole = place and self.tensors[place[0]][place[1]].size == self.dims(node)[dim].size
        return place if is_whole else None

    def is_parameter(self, node: Node | None) -> bool:
        """Check whether the node is the placeholder of a stored parameter."""
        return node is not None and (self.captured.names.get(node.name) in self.captured.parameters)

    def can_be_gated(self, node: Node) -> bool:
        """Check for a parameter, or a buffer of numbers that the forward does not write into."""
        if self.is_parameter(node):
            return True
        value, seen = node.meta.get("val"), [node]
        if node.name not in self.captured.program.graph_signature.inputs_to_buffers:
            return False
        for top in seen:
            if any(written(user) is top for user in top.users):
                return False
            seen += [user for user in top.users if may_view(user)]
        return isinstance(value, Tensor) and value.is_floating_point()

    def read(
        self,
        expr: Expr,
        node: Node,
        weight: tuple[Node, int] | None,
        *others: Node,
        why: str = "",
        stays: bool = False,
    ) -> None:
        """Record that ``node`` contracts the axis away, with dim of ``weight`` where it has one."""
        place = self.place(*weight) if weight else None
        # a standardised weight is not zero where the stored one is
        operands = (*others, weight[0]) if weight and not has_statistics(weight[0]) else others
        if weight and place is None:
            self._note_computed(expr, node, *weight, is_written=False)
        weight_is = "with a weight that is computed" if weight else "without a weight"
        why = why or f"{operator_name(node.target)} sums over it {weight_is}"
        self.reads.append(Read(expr, node, place, operands, why, stays))

    def write(
        self, expr: Expr, node: Node, weight: Node | None, dim: int, *, inner: bool = False
    ) -> None:
        """Record that dim of ``weight`` (or of a bias) produces the axis.

        The result has this dim, too, unless it is an ``inner`` one.
        """
        if weight is not None and not inner:
            self.carried[node, weight] = dim
        place = self.place(weight, dim) if weight is not None else None
        if place is not None:
            self.writes.append(Write(expr, node, place))
        elif weight is not None:
            self._note_computed(expr, node, weight, dim, is_written=True)

    def _note_computed(
        self, expr: Expr, node: Node, weight: Node, dim: int, *, is_written: bool
    ) -> None:
        """Record a dim of a weight that the forward computes from stored tensors."""
        if self.is_weight(weight) and len(shape_of(weight) or ()) > 1:
            owner = module_of(weight) or module_of(node)
            where = f"{owner} (computed weight) dim {dim}".strip()
            self.computed.append(Computed(expr, node, weight, where, is_written))

    def writes_of(self, computed: Computed) -> Iterator[Write]:
        """Yield the parameters' rows behind a computed weight's rows; call it after ``run``."""
        wanted = set(variables(self.solver.resolve(computed.expr)))
        seen = {computed.weight: None}  # in order: the nearest parameter names the axis
        pending = list(seen)
        while pending:
            node = pending.pop(0)
            if self.is_parameter(node):
                name = self.captured.names[node.name]
                for dim, expr in enumerate(self.tensors[name] if self.has_rows(name) else ()):
                    if not wanted.isdisjoint(variables(self.solver.resolve(expr))):
                        yield Write(expr, computed.node, (name, dim))
            new = [operand for operand in valued(node) if operand not in seen]
            pending += new
            seen |= dict.fromkeys(new)

    def is_weight(self, node: Node) -> bool:
        """Check whether the node's value does not depend on the inputs."""
        return node not in self._from_inputs

    def has_rows(self, name: str) -> bool:
        """Check for a matrix or a kernel, not a vector of scales or biases."""
        return len(self.tensors[name]) > 1

    def work(
        self,
        node: Node,
        dims: tuple[Expr, ...],
        *places: Place | None,
        weight: Node | None = None,
        times: float = 1.0,
    ) -> None:
        """Record multiply-accumulates: the product of the sizes of ``dims`` and ``places``.

        They are those of ``weight``, or else of the first parameter that ``node`` reads.
        """
        scale = times / self.captured.batch
        known = tuple(p for p in places if p is not None)
        tensor = self._weight([weight] if weight else node.all_input_nodes)
        self.works.append(Work(node, module_of(node), scale, dims, known, tensor))

    def _weight(self, operands: list[Node]) -> str:
        """The parameter of two or more dims among the operands; empty where there is none."""
        places = (self.place(operand, 0) for operand in operands)
        names = (place[0] for place in places if place is not None)
        return next((name for name in names if len(self.tensors[name]) > 1), "")

    def note_mixed(
        self, node: Node, shares: Node, shares_dim: int, kernels: Node, kernels_dim: int
    ) -> None:
        """Record a contraction of kernels with shares that all stay."""
        self.mixed[node.name] = Mixed(shares.name, shares_dim, kernels.name, kernels_dim)

    def kind(self, expr: Expr, kind: str) -> None:
        """Record the kind of the expression's slots: heads, head dims, groups."""
        self.kinds.append((expr, kind))

    def name(self, expr: Expr, name: str) -> None:
        """Record the name of an axis that is not named after the weight that writes it."""
        self.names.append((expr, name))
