"""Exports that are left early: torch and the file beside all exits computed, one by one."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import small_task
import torch
from stacks import Stack, stack

import l0prune
from l0prune.data import Tensors
from l0prune.errors import CertificateError, L0pruneWarning, UsageError
from l0prune.features.exits import deciding
from l0prune.features.exits.criteria import criterion_of
from l0prune.features.exits.deciding import EarlyExit
from l0prune.features.exits.network import ExitNetwork
from l0prune.features.exits.ways import forced

NOISE = torch.randn(90, small_task.FEATURES, generator=torch.Generator().manual_seed(9))
HELD_OUT = Tensors(small_task.clouds(90, seed=5).inputs + NOISE, small_task.clouds(90).targets)
X = HELD_OUT.inputs[:40]


@pytest.fixture(scope="module")
def dense():
    model = l0prune.add_exits(stack(), (X[:3],), seed=2)
    l0prune.train_dense(model, small_task.data(), epochs=6, lr=1e-2, ema=0.0, report=False)
    l0prune.gate(model, (X[:3],), branches=False)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::9] = -10.0
    return l0prune.export(model)


@pytest.fixture(scope="module")
def early(dense):
    return l0prune.choose_exits(dense, HELD_OUT, budget="macs=0.8")


@pytest.fixture(scope="module")
def file(early, tmp_path_factory):
    return early.save_onnx(tmp_path_factory.mktemp("exits") / "early.onnx")


def session_of(file):
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def by_hand(dense, thresholds):
    """The answers, exits and scores of each example alone, from all exits computed."""
    with torch.no_grad():
        exits = [*dense.module(X).exits]
        last = dense.module(X).logits
    scores = [answer.softmax(1).amax(1) for answer in exits]
    for row in range(len(X)):
        way = next((n for n, s in enumerate(scores) if s[row] >= thresholds[n]), len(exits))
        seen = range(min(way + 1, len(exits)))
        margin = min(abs(float(scores[n][row] - thresholds[n])) for n in seen)
        yield [*exits, last][way][row], way, margin


def test_the_export_is_of_its_own_class(dense):
    assert type(dense.module) is ExitNetwork
    assert dense.params < dense.params_before


def test_thresholds_keep_to_the_budget(early, dense):
    ways = [each.share for each in early.exits]
    assert sum(ways) == pytest.approx(1)
    assert early.expected <= 0.8 * early.whole
    assert early.whole == dense.macs
    loss = l0prune.evaluate(dense.module, ([], HELD_OUT))
    assert early.last == pytest.approx(loss["error"])


def test_what_is_said_of_the_examples_is_so(early):
    with torch.no_grad():
        found = early.module.decide(HELD_OUT.inputs)
    wrong = (found.output.argmax(1) != HELD_OUT.targets).float().mean()
    assert early.value == pytest.approx(float(wrong))
    for number, each in enumerate(early.exits):
        assert each.share == pytest.approx(float((found.exit == number).float().mean()))


@pytest.mark.parametrize("thresholds", [(0.5, 0.6), (0.9, 0.7), (0.0, 0.0), (2.0, 2.0)])
def test_torch_does_what_is_done_by_hand(dense, thresholds):
    module = EarlyExit(dense.module, criterion_of("confidence"), torch.tensor(thresholds)).eval()
    with torch.no_grad():
        together = module.decide(X)
    for row, (answer, way, margin) in enumerate(by_hand(dense, thresholds)):
        with torch.no_grad():
            alone = module.decide(X[row : row + 1])
        assert way == alone.exit == together.exit[row]
        assert torch.allclose(answer, alone.output[0], atol=1e-5)
        assert torch.allclose(answer, together.output[row], atol=1e-5)
        for each in (alone.margin[0], together.margin[row]):
            assert float(each) == pytest.approx(margin, abs=1e-5)


def test_the_file_does_what_is_done_by_hand(early, file, dense):
    session = session_of(file)
    ways = set()
    for row, (answer, way, margin) in enumerate(by_hand(dense, early.module.thresholds)):
        output, exit_, told = session.run(None, {"points": X[row : row + 1].numpy()})
        assert way == exit_[0]
        assert np.allclose(answer, output[0], atol=1e-5)
        assert told[0] == pytest.approx(margin, abs=1e-5)
        ways.add(way)
    assert ways == {0, 1, 2}


def test_what_follows_an_exit_is_not_computed(dense):
    called = []
    module = EarlyExit(dense.module, criterion_of("entropy"), forced(2, 1))
    hooks = [
        block.register_forward_hook(lambda *_, number=number: called.append(number))
        for number, block in enumerate(dense.module.network.blocks)
    ]
    module(X[:1])
    for hook in hooks:
        hook.remove()
    assert dense.module.at[1] == "blocks.2"
    assert called == [0, 1, 2]
    assert not any(block._forward_hooks for block in dense.module.network.blocks)


def test_the_rest_of_the_network_stands_inside_an_if(file):
    graph = onnx.load(file).graph
    (leave,) = (node for node in graph.node if node.op_type == "If")
    rest = next(a.g for a in leave.attribute if a.name == "else_branch")
    (again,) = (node for node in rest.node if node.op_type == "If")
    last = next(a.g for a in again.attribute if a.name == "else_branch")
    held = [{each.name for each in g.initializer} for g in (graph, rest, last)]
    for part in (graph, rest, last):
        assert any(node.op_type in ("Gemm", "MatMul") for node in part.node)
    assert all(held)
    assert not held[0] & held[1] | held[1] & held[2]
    assert [each.name for each in graph.output] == ["logits", "exit", "margin"]


def test_the_file_says_what_it_is(file, early):
    facts = session_of(file).get_modelmeta().custom_metadata_map
    told = json.loads(facts["l0prune.exits"])
    assert told == json.loads(json.dumps(early.to_dict()))
    assert facts["l0prune.batch"].startswith("1 only")
    parts = {c["part"] for c in json.loads(facts["l0prune.certificate"]) if c["what"] == "onnx"}
    assert parts == {"exit 0", "exit 1", "the last exit"}


def test_larger_batches_are_refused_by_the_file(file):
    with pytest.raises(Exception, match="invalid dimensions"):
        session_of(file).run(None, {"points": X[:2].numpy()})


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_written(dense, tmp_path):
    early = l0prune.choose_exits(dense, HELD_OUT, budget="macs=0.8")
    with torch.no_grad():
        early.module.network.heads[1].linear.bias += 1
    with pytest.raises(CertificateError, match="does not compute what"):
        early.save_onnx(tmp_path / "early.onnx")
    assert not [*tmp_path.iterdir()]


def test_a_budget_below_the_first_exit_is_refused(dense):
    with pytest.raises(UsageError, match="leaving at the first exit always takes"):
        l0prune.choose_exits(dense, HELD_OUT, budget="macs=0.01")


def test_exits_that_all_or_none_leave_by_are_said(dense):
    with pytest.warns(L0pruneWarning, match="answers every example that reaches it"):
        all_of_them = l0prune.choose_exits(dense, HELD_OUT, tolerance=0.99)
    assert [each.share for each in all_of_them.exits] == [1, 0, 0]
    with torch.no_grad():
        last, exits = dense.module(HELD_OUT.inputs)
    right = last.argmax(1)
    differ = exits[0].argmax(1) != right
    never = Tensors(HELD_OUT.inputs[differ], right[differ])
    with pytest.warns(L0pruneWarning, match=r"exit 0 .* answers no held-out example"):
        l0prune.choose_exits(dense, never, tolerance=1e-6)


@pytest.mark.parametrize("name", ["confidence", "entropy", "patience"])
def test_scores_move_no_faster_than_they_say(name):
    criterion = criterion_of(name)
    generator = torch.Generator().manual_seed(0)
    answers = [3 * torch.randn(500, 7, generator=generator) for _ in range(3)]
    moved = [a + 1e-3 * (2 * torch.rand(a.shape, generator=generator) - 1) for a in answers]
    threshold = torch.tensor(0.5)
    before, after = (criterion.score(each) for each in (answers, moved))
    margin = criterion.margin(before, threshold, answers)
    flips = (before >= threshold) != (after >= threshold)
    assert bool((margin[flips] <= criterion.steepness * 1e-3).all())
    if name != "patience":
        assert float((before - after).abs().max()) <= criterion.steepness * 1e-3


def test_patience_counts_who_agrees_without_a_break():
    answers = [torch.eye(3)[torch.tensor(chosen)] for chosen in ([0, 1, 2], [1, 1, 2], [1, 1, 0])]
    found = [criterion_of("patience").score(answers[: n + 1]).tolist() for n in range(3)]
    assert found == [[0, 0, 0], [0, 1, 1], [1, 2, 0]]


REFUSED = {
    "either a budget": {},
    "or a tolerance": {"budget": "macs=0.5", "tolerance": "1%"},
    "one limit of the whole network": {"budget": "params=0.5"},
    "there is no criterion 'luck'": {"tolerance": "1%", "criterion": "luck"},
    "measure is macs or latency": {"tolerance": "1%", "measure": "params"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_makes_no_sense_is_refused(dense, said):
    with pytest.raises(UsageError, match=said):
        l0prune.choose_exits(dense, HELD_OUT, **REFUSED[said])


def test_an_export_without_exits_is_refused():
    with pytest.raises(UsageError, match="no early exits"):
        l0prune.choose_exits(l0prune.export(small_task.gated()), HELD_OUT, tolerance="1%")


class Rigid(Stack):
    """Its code allows one width, so that what is cut is no longer of its class."""

    def forward(self, points):
        x = self.stem(points).relu()
        if x.shape[1] != 12:
            raise ValueError("not my width")
        return self.last(self.blocks(x))


@pytest.mark.slow
def test_a_captured_graph_is_left_early_too():
    torch.manual_seed(0)
    model = l0prune.add_exits(Rigid(), (X[:3],))
    l0prune.gate(model, (X[:3],), branches=False)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::9] = -10.0
    small = l0prune.export(model)
    assert not small.rebuilt
    reached = []
    deciding.run(small.module, (X[:1],), {}, lambda *told: reached.append(told))
    assert [number for number, _ in reached] == [0, 1]
    assert torch.allclose(reached[0][1], model.eval()(X[:1]).exits[0], atol=1e-6)
    module = EarlyExit(small.module, criterion_of("confidence"), torch.tensor((0.4, 0.4))).eval()
    with torch.no_grad():
        together = module.decide(X)
        for row in range(10):
            found = module.decide(X[row : row + 1])
            assert found.exit == together.exit[row]
            assert torch.allclose(found.output[0], together.output[row], atol=1e-6)
    assert len(together.exit.unique()) > 1
