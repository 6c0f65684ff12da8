"""Cut vocabularies: logits of the tokens that stay are those of the whole model."""

import copy
import random

import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import l0prune
from l0prune.errors import AlreadyGated, CertificateError, UsageError

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = [*SPECIAL[:2], "one", "two", *SPECIAL[2:], *(f"w{number}" for number in range(34))]
KEPT = [0, 1, 2, 4, 5, 9, 11, 12, 30, 38, 39]  # the special ones, and those of TEXT
TEXT = "one w3 w5 w6 w5 w24 w32 w33"
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 4}


def words():
    result = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result.add_special_tokens(SPECIAL)
    return result


class Recurrent(nn.Module):
    """A language model of nobody's library, whose head is not tied to its table."""

    def __init__(self, scale=1.0, extra=0):
        super().__init__()
        self.tokens, self.scale = 40 + extra, scale
        self.table = nn.Embedding(self.tokens, 12, padding_idx=4)
        self.inner = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, self.tokens)

    def forward(self, ids):
        batch, length = ids.shape
        logits = self.head(self.inner(self.table(ids) * self.scale)[0])
        return logits.view(batch, length, self.tokens)


class Stage(nn.Module):
    """One step of a random language model. Shape: ``(n, length, 12)``, and so the result."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 12)
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.recurrent = nn.LSTM(12, 12, batch_first=True)
        self.along = nn.Conv1d(12, 12, 3, padding=1)

    def forward(self, x):
        if self.kind == "recurrent":
            return self.recurrent(x)[0]
        if self.kind == "attention":
            return x + self.attention(*[self.norm(x)] * 3, need_weights=False)[0]
        if self.kind == "along":
            return torch.relu(self.along(x.transpose(1, 2))).transpose(1, 2)
        return self.norm(x + self.second(torch.tanh(self.first(x))))


class RandomLanguage(nn.Module):
    """Tied or not, with a bias or not, with a table that is scaled and one of positions or not."""

    def __init__(self, draw):
        super().__init__()
        kinds = draw.choices(("recurrent", "attention", "along", "mlp"), k=draw.randint(1, 4))
        self.table = nn.Embedding(40, 12, padding_idx=draw.choice((None, 1)))
        self.stages = nn.Sequential(*map(Stage, kinds))
        self.head = nn.Linear(12, 40, bias=draw.random() < 0.5)
        if draw.random() < 0.5:
            self.head.weight = self.table.weight
        self.scale = draw.choice((1.0, 12**0.5))
        self.positions = nn.Embedding(16, 12) if draw.random() < 0.5 else None

    def forward(self, ids):
        x = self.table(ids) * self.scale
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.stages(x))


def logits(model, ids):
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found)


def some_ids(batch=3, length=7):
    generator = torch.Generator().manual_seed(2)
    return torch.tensor(KEPT)[torch.randint(len(KEPT), (batch, length), generator=generator)]


def assert_exact(whole, result):
    old = some_ids()
    new = torch.tensor([[KEPT.index(number) for number in row] for row in old.tolist()])
    assert torch.equal(result.new_ids(old), new)
    assert torch.equal(result.old_ids(new), old)
    whole, small = copy.deepcopy(whole).double(), copy.deepcopy(result.model).double()
    expected = logits(whole.eval(), old)[..., KEPT]
    torch.testing.assert_close(logits(small.eval(), new), expected, rtol=1e-12, atol=1e-12)


def llama(tied=True, **more):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=tied, **more)
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def result():
    return l0prune.shrink_vocabulary(llama(), words(), text=TEXT)


@pytest.mark.parametrize("inputs", [None, torch.randint(40, (2, 5))])
def test_a_model_of_a_users_own_class(inputs):
    torch.manual_seed(0)
    model = Recurrent().eval()
    before = copy.deepcopy(model.state_dict())
    result = l0prune.shrink_vocabulary(model, words(), text=TEXT, inputs=inputs)
    assert result.kept.tolist() == KEPT
    small = result.model
    assert (type(small), small.tokens, small.table.num_embeddings) == (Recurrent, 11, 11)
    assert (small.head.out_features, small.table.padding_idx) == (11, KEPT.index(4))
    assert result.params == result.params_before - 29 * (12 + 16 + 1)
    assert_exact(model, result)
    assert torch.equal(small.table.weight, model.table.weight[KEPT])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.one_in(20)
def test_random_language_models(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = RandomLanguage(draw).eval()
    chosen = draw.sample(WORDS[5:], draw.randint(1, 30))
    result = l0prune.shrink_vocabulary(model, words(), text=" ".join(chosen))
    kept = result.kept.tolist()
    assert {*kept} == {WORDS.index(word) for word in (*chosen, *SPECIAL)}
    old = torch.tensor(kept)[torch.randint(len(kept), (3, 7))]
    whole, small = copy.deepcopy(model).double(), copy.deepcopy(result.model).double()
    expected = logits(whole, old)[..., kept]
    found = logits(small, result.new_ids(old))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (small.head.weight is small.table.weight) == (model.head.weight is model.table.weight)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tied_or_untied_head_with_the_configuration(tied):
    model = llama(tied)
    result = l0prune.shrink_vocabulary(model, words(), text=TEXT)
    small = result.model
    assert (small.lm_head.weight is small.model.embed_tokens.weight) == tied
    assert (small.config.vocab_size, small.model.vocab_size, small.vocab_size) == (11, 11, 11)
    ids = (small.config.eos_token_id, small.generation_config.eos_token_id)
    assert ids == (KEPT.index(4),) * 2
    assert (model.config.vocab_size, model.config.eos_token_id) == (40, 4)
    assert small.training  # as the model was
    assert_exact(model, result)


def test_rows_that_no_token_has_go_too():
    model = Recurrent(extra=8)
    result = l0prune.shrink_vocabulary(model, words(), text=TEXT)
    assert (len(result.tokens), result.model.tokens) == (48, 11)
    assert_exact(model, result)


@pytest.mark.slow
def test_positions_that_are_counted_from_the_padding_stay():
    torch.manual_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(**SIZES, max_position_embeddings=64)).eval()
    result = l0prune.shrink_vocabulary(model, words(), text=TEXT)
    assert result.model.roberta.embeddings.position_embeddings.num_embeddings == 64
    assert result.model.lm_head.bias.shape == (11,)
    assert_exact(model, result)


@pytest.mark.slow
def test_both_inputs_of_an_encoder_and_a_decoder_are_ids():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    ids = {"pad_token_id": 1, "eos_token_id": 4, "decoder_start_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, **sizes, **ids)).eval()
    result = l0prune.shrink_vocabulary(model, words(), text=TEXT)
    old = some_ids()
    new = result.new_ids(old)
    expected = model(input_ids=old, decoder_input_ids=old).logits[..., KEPT]
    found = result.model(input_ids=new, decoder_input_ids=new).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_the_smaller_model_is_gated_and_exported_as_any_other(result, tmp_path):
    ids = torch.tensor([[0, 5, 2], [3, 1, 4]])
    gated = l0prune.gate(copy.deepcopy(result.model).eval(), (ids,), branches=False)
    gates = l0prune.gates(gated)
    gates.set_open(torch.arange(gates.plan.size) % 3 != 0)
    small = l0prune.export(gated)
    assert small.rebuilt
    assert small.module.config.vocab_size == 11
    torch.testing.assert_close(logits(small.module, ids), logits(gated, ids))
    file, *_ = small.save_onnx(tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(file)
    name = session.get_inputs()[0].name
    session.run(None, {name: ids.numpy()})
    with pytest.raises(InvalidArgument, match="out of data bounds"):
        session.run(None, {name: ids.numpy() + 28})


@pytest.mark.slow
def test_a_folder_has_model_tokenizer_and_map(tmp_path):
    fast = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="<pad>", eos_token="</s>")
    result = l0prune.shrink_vocabulary(llama(), fast, text=TEXT)
    result.save(tmp_path / "small")
    loaded = l0prune.load_model(f"transformers:{tmp_path / 'small'}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    assert torch.equal(result.old_ids(ids), torch.tensor([fast(TEXT)["input_ids"]]))
    assert torch.equal(logits(loaded, ids), logits(result.model.eval(), ids))
    assert loaded.config.eos_token_id == tokenizer.eos_token_id == KEPT.index(4)


def test_an_id_that_was_cut_out_is_named(result):
    with pytest.raises(UsageError, match=r"the token 'w0' \(id 6\) is not in the cut vocabulary"):
        result.new_ids(torch.tensor([[0, 6]]))
    with pytest.raises(UsageError, match="no token of the id 77"):
        result.new_ids(torch.tensor([0, 77]))
    with pytest.raises(UsageError, match="11 is no id"):
        result.old_ids(torch.tensor(11))
    with pytest.raises(IndexError):
        result.model(torch.tensor([[0, 39]]))


class Marked(Recurrent):
    """Its code has an id written into it."""

    def forward(self, ids):
        return super().forward(ids) * (ids == 39)[..., None]


class Normed(Recurrent):
    """Its output depends on the logits of all tokens."""

    def forward(self, ids):
        return super().forward(ids).log_softmax(-1)


@pytest.mark.parametrize("kind", [Marked, Normed])
def test_a_model_that_would_compute_something_else_is_refused(kind):
    with pytest.raises(CertificateError, match="computes something else"):
        l0prune.shrink_vocabulary(kind(), words(), text=TEXT)


def test_what_cannot_be_is_refused():
    model = Recurrent()
    with pytest.raises(UsageError, match="which tokens stay"):
        l0prune.shrink_vocabulary(model, words())
    with pytest.raises(UsageError, match="no token of the id 40"):
        l0prune.shrink_vocabulary(model, words(), ids=[40])
    with pytest.raises(UsageError, match="too small: 4 have to stay"):
        l0prune.shrink_vocabulary(model, words(), text=TEXT, size=3)
    with pytest.raises(UsageError, match="none that is smaller"):
        l0prune.shrink_vocabulary(model, words(), text=TEXT, size=400)
    inputs = torch.randn(2, 12)
    with pytest.raises(UsageError, match="no input of the model chooses rows"):
        l0prune.shrink_vocabulary(nn.Linear(12, 40), words(), text=TEXT, inputs=inputs)
    gated = l0prune.gate(Recurrent(), (torch.zeros(2, 5, dtype=torch.int64),))
    with pytest.raises(AlreadyGated):
        l0prune.shrink_vocabulary(gated, words(), text=TEXT)
