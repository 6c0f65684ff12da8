"""Mixtures of fewer experts: what they compute is what is computed without the others."""

import copy

import pytest
import torch
import transformers
from torch import nn

import l0prune
from l0prune.errors import AlreadyGated, CertificateError, UsageError
from l0prune.features.experts.choosing import SCORES, chosen, observing
from l0prune.features.experts.mixtures import mixtures_in

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
MOE = {"moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 4, "first_k_dense_replace": 1, "n_shared_experts": 1}
FAMILIES = {
    "Mixtral": {"num_local_experts": 6},
    "Qwen2Moe": {"num_experts": 6, **MOE, "shared_expert_intermediate_size": 20},
    "Qwen3Moe": {"num_experts": 6, **MOE, "head_dim": 8},
    "Olmoe": {"num_experts": 6},
    "GptOss": {"num_local_experts": 6, "head_dim": 8},
    "DeepseekV3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, **MOE, **LATENT},
}


def built(family, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def ids(rows=8):
    return torch.randint(40, (rows, 7), generator=torch.Generator().manual_seed(1))


def never_chosen(model, result):
    """A copy whose routers, each in its own code, never choose the experts that are gone."""
    again = copy.deepcopy(model)
    for path, kept in result.kept.items():
        children = dict(again.get_submodule(path).named_children())
        router = children.get("gate") or children["router"]
        gone = torch.ones(len(result.loads[path]), dtype=torch.bool)
        gone[kept] = False
        if hasattr(router, "bias"):
            router.bias.data[gone] = -torch.inf
        elif hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias[gone] = -1e9
        else:
            router.forward = _written_out(router, gone)
    return again


def _written_out(router, gone):
    def forward(hidden):
        scores = (hidden.flatten(0, -2) @ router.weight.T).masked_fill(gone, -torch.inf).softmax(-1)
        best, index = scores.topk(2, -1)
        if getattr(router, "norm_topk_prob", True):
            best = best / best.sum(-1, keepdim=True)
        return scores, best, index

    return forward


@pytest.mark.parametrize(
    "family",
    ["Mixtral", *(pytest.param(each, marks=pytest.mark.slow) for each in list(FAMILIES)[1:])],
)
def test_the_families_of_transformers(family):
    model = built(family)
    before = copy.deepcopy(model.state_dict())
    result = l0prune.shrink_experts(model, ids(), 4, score="reap")
    small = result.model
    assert type(small) is type(model)
    assert all(len(kept) == 4 for kept in result.kept.values())
    assert result.error < 1e-5
    given = ids(3)
    expected = never_chosen(model, result)(given).logits
    torch.testing.assert_close(small(given).logits, expected)
    assert (expected - model(given).logits).abs().max() > 1e-3  # something is gone
    fresh = type(small)(small.config)  # the configuration says the new number
    fresh.load_state_dict(small.state_dict())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_parameters_that_are_stored_and_those_that_one_input_meets():
    model = built("Mixtral")
    result = l0prune.shrink_experts(model, ids(), 4, score="load")
    each, row = 3 * 16 * 24, 16
    assert result.params == result.params_before - 2 * 2 * (each + row)
    assert result.active_before == result.params_before - 2 * 4 * each
    assert result.active == result.active_before - 2 * 2 * row
    assert result.params == sum(p.numel() for p in result.model.parameters())


@pytest.mark.slow
def test_a_budget_in_parameters_that_one_input_uses():
    model = built("Mixtral")
    active = l0prune.shrink_experts(model, ids(), 4, score="load").active_before
    l0prune.gate(model, (ids(),), branches=False, progress=False)
    counts = l0prune.fit(
        model, "active_params=0.9", l0prune.score(model, "magnitude"), round_to=1, progress=False
    )
    small = l0prune.export(model, verify="float32", progress=False).module
    stored = sum(p.numel() for p in small.parameters())
    assert 0.8 * active < counts["active_params=0.9"] <= 0.9 * active
    matrices = sum(p.numel() for n, p in small.named_parameters() if "experts." in n)
    assert counts["active_params=0.9"] == stored - matrices + matrices * 2 // 6
    dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    l0prune.gate(dense, torch.randn(2, 4), progress=False)
    with pytest.raises(UsageError, match="the model has no mixture of experts"):
        l0prune.fit(dense, "active_params=0.5", progress=False)


class Mixture(nn.Module):
    """Experts in a list, each run on what was routed to it, as older code has it."""

    def __init__(self, experts=5, dense=False):
        super().__init__()
        self.experts_left, self.k, self.dense = experts, 2, dense
        self.route = nn.Linear(8, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(experts)
        )

    def forward(self, x):
        share, index = self.route(x).softmax(-1).topk(self.k)
        out = torch.zeros_like(x)
        for number in range(self.experts_left):
            rows, place = torch.where(index == number)
            out = out.index_add(0, rows, self.experts[number](x[rows]) * share[rows, place, None])
        return x + out


def listed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Mixture(), nn.Linear(8, 3)).eval()


def shares(mixture, x):
    """Share times norm of output of every expert for every input, 0 where it is not chosen."""
    best, index = mixture.route(x).softmax(-1).topk(2)
    share = torch.zeros(len(x), len(mixture.experts)).scatter(1, index, best)
    return share * torch.stack([expert(x).norm(dim=1) for expert in mixture.experts], 1)


def test_experts_in_a_list():
    model, x = listed(), torch.randn(40, 6)
    result = l0prune.shrink_experts(model, x, 3, score="reap")
    kept, small = result.kept["1"], result.model
    assert (len(small[1].experts), small[1].experts_left, small[1].route.out_features) == (3, 3, 3)
    closed = copy.deepcopy(model)
    gone = [n for n in range(5) if n not in kept]
    closed[1].route.bias.data[gone] = -torch.inf
    torch.testing.assert_close(small(x), closed(x))
    assert (len(model[1].experts), model[1].experts_left) == (5, 5)


class Biased(Mixture):
    """The bias and the temperatures of its router are the block's own."""

    def __init__(self):
        super().__init__()
        self.bias, self.warmth = nn.Parameter(torch.randn(5)), nn.Buffer(torch.rand(5) + 0.5)
        self.unrelated = nn.Parameter(torch.randn(5))

    def route_by(self, scores):
        return scores.mul(self.warmth.double()[None]).add(self.bias.to(scores.dtype)).softmax(-1)

    def forward(self, x):
        share, index = self.route_by(self.route(x)).topk(self.k)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(index == number)
            out = out.index_add(0, rows, expert(x[rows]) * share.to(x)[rows, place, None])
        return x + out + self.unrelated.sum()


def test_a_bias_beside_the_router_is_cut_with_it():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), Biased(), nn.Linear(8, 3)).eval(), torch.randn(40, 6)
    result = l0prune.shrink_experts(model, x, 3, score="load")
    kept, small = result.kept["1"], result.model[1]
    assert torch.equal(small.bias, model[1].bias[kept])
    assert torch.equal(small.warmth, model[1].warmth[kept])
    assert small.unrelated.shape == (5,)
    closed = copy.deepcopy(model)
    closed[1].bias.data[[i for i in range(5) if i not in kept.tolist()]] = -torch.inf
    torch.testing.assert_close(result.model(x), closed(x))
    each, row = 8 * 12 + 12 + 12 * 8 + 8, 8 + 1 + 1
    assert result.params_before - result.params == 2 * (each + row)
    assert result.active_before - result.active == 2 * row


@pytest.mark.parametrize("name", ["reap", "load"])
def test_scores_are_those_of_their_definitions(name):
    model, x = listed(), torch.randn(40, 6)
    (mixture,) = mixtures_in(model, ((x,), {}))
    with torch.no_grad(), observing(model, [mixture]) as seen:
        model(x[:25])
        model(x[25:])
    found = SCORES[name](model, mixture, seen[mixture.router.name])
    own = shares(model[1], model[0](x)).double()
    count = (own > 0).sum(0)
    expected = own.sum(0) / count if name == "reap" else count.double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_reap_is_the_same_of_a_list_and_of_one_tensor():
    model = built("Mixtral")
    found = mixtures_in(model, ((ids(),), {}))
    with torch.no_grad(), observing(model, found) as seen:
        model(ids())
    mixture, block = found[0], model.model.layers[0].mlp
    observed = seen[mixture.router.name]
    scores = SCORES["reap"](model, mixture, observed)
    (x,), _ = observed.calls[0]
    x = x.flatten(0, 1)
    best, index = (x @ block.gate.weight.T).softmax(-1).topk(2)
    best = best / best.sum(1, keepdim=True)
    for expert in range(6):
        rows, place = torch.where(index == expert)
        gate, up = (x[rows] @ block.experts.gate_up_proj[expert].T).chunk(2, 1)
        made = (nn.functional.silu(gate) * up) @ block.experts.down_proj[expert].T
        norms = best[rows, place] * made.norm(dim=1)
        expected = norms.mean().item() if len(rows) else 0
        assert scores[expert].item() == pytest.approx(expected, rel=1e-4)


def test_by_output_the_pair_goes_that_moves_it_least_one_after_the_other():
    model, x = listed(), torch.randn(40, 6)
    (mixture,) = mixtures_in(model, ((x,), {}))
    with torch.no_grad(), observing(model, [mixture]) as seen:
        whole = model(x)
    kept = chosen(model, mixture, seen[mixture.router.name], 4, "output")

    @torch.no_grad()
    def moved(gone):
        closed = copy.deepcopy(model[1])
        closed.route.bias.data[gone] = -torch.inf
        return float((closed(model[0](x)) - model[1](model[0](x))).square().sum())

    assert whole.shape == (40, 3)
    assert set(range(5)) - set(kept.tolist()) == {min(range(5), key=moved)}


@pytest.mark.slow
def test_a_folder_is_what_transformers_loads(tmp_path):
    result = l0prune.shrink_experts(built("Mixtral"), {"input_ids": ids()}, 4)
    result.save(tmp_path / "small")
    loaded = l0prune.load_model(f"transformers:{tmp_path / 'small'}")
    assert loaded.config.num_local_experts == 4
    torch.testing.assert_close(loaded(ids()).logits, result.model(ids()).logits)
    gated = l0prune.gate(loaded, (ids(),), branches=False)
    assert all("attn" in name for name in l0prune.gates(gated).plan.names)


@pytest.mark.slow
def test_a_file_of_fewer_experts_with_fewer_slots_beside(tmp_path):
    small = l0prune.shrink_experts(built("Mixtral"), ids(), 4, score="load").model
    small.set_experts_implementation("batched_mm")  # of operators that a file can have
    gated = l0prune.gate(small, (ids(2),), branches=False)
    gates = l0prune.gates(gated)
    gates.set_open(torch.arange(gates.plan.size) % 3 != 0)
    dense = l0prune.export(gated)
    dense.save_onnx(tmp_path / "small.onnx")
    assert dense.rebuilt
    assert dense.certificate.worst(("onnx",), "float32") < 1e-5


class Counted(Mixture):
    """Its code has the number of experts written into it."""

    def forward(self, x):
        return super().forward(x) + self.route(x).view(-1, 5).sum(1, keepdim=True)


def test_what_cannot_be_is_refused():
    model, x = listed(), torch.randn(40, 6)
    with pytest.raises(UsageError, match="1 experts are fewer than the 2 that each input gets"):
        l0prune.shrink_experts(model, x, 1)
    with pytest.raises(UsageError, match="no mixture of the model has more than 5"):
        l0prune.shrink_experts(model, x, 5)
    with pytest.raises(UsageError, match="score is output, load, reap, not 'best'"):
        l0prune.shrink_experts(model, x, 3, score="best")
    with pytest.raises(UsageError, match="the model has no mixture"):
        l0prune.shrink_experts(nn.Linear(6, 3), x, 3)
    with pytest.raises(CertificateError, match="cannot be cut"):
        l0prune.shrink_experts(nn.Sequential(nn.Linear(6, 8), Counted()), x, 3)
    gated = l0prune.gate(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), x)
    with pytest.raises(AlreadyGated):
        l0prune.shrink_experts(gated, x, 3)


@pytest.mark.slow
def test_groups_keep_equally_many():
    model = built("DeepseekV3")
    with pytest.raises(UsageError, match="keep a multiple of 2 experts, at least 4, not 5"):
        l0prune.shrink_experts(model, ids(), 5)
    result = l0prune.shrink_experts(model, ids(), 6, score="load")
    for kept in result.kept.values():
        assert (kept // 4).bincount().tolist() == [3, 3]
