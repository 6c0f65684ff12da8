"""Cut tokenizers: what needs no other tokens is written as before."""

import json
import random
from itertools import pairwise

import pytest
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from l0prune.errors import UsageError
from l0prune.features.vocabulary.cut_tokenizer import CutTokenizer, renewed

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
# A text in which words have many parts in common, so that merges depend on one another.
WORDS = [
    a + b + c
    for a in ("re", "un", "aab", "")
    for b in ("do", "aba", "turn")
    for c in ("ing", "ed", "aa", "s")
]


def text(seed, words=400):
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def trained(model, trainer, before=None, after=None, **settings):
    result = Tokenizer(model)
    result.pre_tokenizer = before or pre_tokenizers.Whitespace()
    if after is not None:
        result.decoder = after
    settings = {"vocab_size": 160, "special_tokens": SPECIAL, "show_progress": False, **settings}
    result.train_from_iterator([text(0)], trainer(**settings))
    return result


def byte_level(**settings):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    before = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = {"vocab_size": 340, "initial_alphabet": alphabet}
    return trained(
        models.BPE(**settings), trainers.BpeTrainer, before, decoders.ByteLevel(), **made
    )


KINDS = {
    "bpe": byte_level,
    "bpe-whole-words": lambda: byte_level(ignore_merges=True),
    "bpe-suffix": lambda: trained(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        trainers.BpeTrainer,
        end_of_word_suffix="</w>",
    ),
    "bpe-prefix": lambda: trained(
        models.BPE(unk_token="<unk>", continuing_subword_prefix="##"),
        trainers.BpeTrainer,
        continuing_subword_prefix="##",
    ),
    "wordpiece": lambda: trained(models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
    "unigram": lambda: trained(
        models.Unigram(), trainers.UnigramTrainer, pre_tokenizers.Metaspace(), unk_token="<unk>"
    ),
    "words": lambda: trained(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
}


@pytest.fixture(scope="module", params=KINDS)
def whole(request):
    return KINDS[request.param]()


def ids(tokenizer, words):
    return tokenizer.encode(words, add_special_tokens=False).ids


def test_text_whose_tokens_stay_is_written_with_the_same(whole):
    cutter, seen = CutTokenizer(whole), 0
    for seed in range(8):
        order = random.Random(seed).sample(sorted(cutter.tokens), len(cutter.tokens) // 3)
        kept = cutter.chosen(order)
        small = cutter.cut(kept)
        assert small.get_vocab_size() == len(kept)
        assert [small.id_to_token(n) for n in range(len(kept))] == [cutter.tokens[n] for n in kept]
        many = text(seed + 1, 120).split()
        for words in (*set(many), *map(" ".join, pairwise(many))):
            before = ids(whole, words)
            if set(before) <= set(kept):
                seen += 1
                assert [kept[number] for number in ids(small, words)] == before
    assert seen > 20


def test_every_token_that_stays_can_be_written(whole):
    cutter = CutTokenizer(whole)
    words = {word for word in WORDS if len(ids(whole, word)) == 1}
    kept = cutter.chosen([ids(whole, word)[0] for word in sorted(words)[::2]])
    small = cutter.cut(kept)
    for word in sorted(words)[::2]:
        assert [cutter.tokens[kept[number]] for number in ids(small, word)] == [
            cutter.tokens[ids(whole, word)[0]]
        ]


def test_any_bytes_are_written_and_read_back_by_the_fewest_tokens():
    cutter = CutTokenizer(byte_level())
    small = cutter.cut(cutter.chosen([]))
    assert small.get_vocab_size() == 256 + len(SPECIAL)
    assert small.decode(ids(small, "reaabturning: ñ €")) == "reaabturning: ñ €"


def test_so_many_tokens_stay_as_are_asked_for(whole):
    cutter = CutTokenizer(whole)
    counts = cutter.count([text(1)])
    order = [number for number, _ in counts.most_common()]
    for size in (len(cutter.required) + 20, len(cutter.tokens)):
        kept = cutter.chosen(order, size)
        assert len(kept) == size == len(set(kept))
        assert cutter.required <= set(kept)
    with pytest.raises(UsageError, match="have to stay"):
        cutter.chosen(order, 2)


@pytest.mark.parametrize("around", ["template", "roberta"])
def test_what_is_put_around_a_text_has_the_new_ids(around):
    whole = byte_level()
    end, start = whole.token_to_id("</s>"), whole.token_to_id("<s>")
    whole.add_special_tokens(["<mask>"])
    whole.enable_padding(pad_id=1, pad_token="<pad>")
    if around == "roberta":
        whole.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", start))
    else:
        pair = "<s> $A </s> $B:1 <mask>:1"
        known = [("<s>", start), ("</s>", end), ("<mask>", whole.token_to_id("<mask>"))]
        whole.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair=pair, special_tokens=known
        )
    cutter = CutTokenizer(whole)
    kept = cutter.chosen([], 300)
    small = cutter.cut(kept)
    for given in ("reaab", ("un", "do")):
        pair_of = (given,) if isinstance(given, str) else given
        found = small.encode(*pair_of)
        assert [kept[number] for number in found.ids][:1] == [start]
        assert found.tokens[-1] == whole.encode(*pair_of).tokens[-1]
    batch = small.encode_batch(["reaabturning", "a"])
    assert batch[1].ids[-1] == kept.index(1)


def test_a_tokenizer_of_transformers_keeps_its_class_and_its_settings():
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **names)
    whole.chat_template = "{{ messages }}"
    cutter = CutTokenizer(whole)
    kept = cutter.chosen([], 300)
    small = renewed(whole, cutter.cut(kept))
    assert type(small) is type(whole)
    assert (len(small), small.eos_token, small.chat_template) == (300, "</s>", whole.chat_template)
    assert small.eos_token_id == kept.index(whole.eos_token_id)
    assert len(whole) == len(cutter.tokens)


def merged(kind):
    """The tokens and merges of a tokenizer of this file."""
    model = json.loads(KINDS[kind]().to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def pieces(*first):
    """The pieces of the Unigram tokenizer of this file, with their scores, after other ones."""
    found = json.loads(KINDS["unigram"]().to_str())["model"]["vocab"]
    return [*((name, 0.0) for name in first), *(tuple(p) for p in found if p[0] not in SPECIAL)]


def _with_ends(made):
    """What a tokenizer is made of, with the tokens that CLIP puts around a text."""
    ends = ("<|startoftext|>", "<|endoftext|>")
    known = {**made["vocab"], **{end: len(made["vocab"]) + n for n, end in enumerate(ends)}}
    return {**made, "vocab": known}


CLASSES = {
    "GPT2Tokenizer": lambda: {**merged("bpe"), "unk_token": "<s>", "pad_token": "<pad>"},
    "RobertaTokenizer": lambda: merged("bpe"),
    "CLIPTokenizer": lambda: _with_ends(merged("bpe-suffix")),
    "BertTokenizer": lambda: {
        "vocab": {w: n for n, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "undo", "##ing"])}
    },
    "T5Tokenizer": lambda: {"vocab": pieces("<pad>", "</s>", "<unk>"), "extra_ids": 5},
    "XLMRobertaTokenizer": lambda: {"vocab": pieces("<s>", "<pad>", "</s>", "<unk>")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers_come_back_from_a_folder(name, tmp_path):
    whole = getattr(transformers, name)(**CLASSES[name]())
    cutter = CutTokenizer(whole)
    counts = cutter.count(["undoing reaba undo"])
    kept = cutter.chosen(counts)
    small = renewed(whole, cutter.cut(kept))
    small.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(small) is type(whole)
    assert len(small) == len(kept)
    for each in (small, again):
        found = each("undoing undo")["input_ids"]
        assert [kept[number] for number in found] == whole("undoing undo")["input_ids"]
        assert each.all_special_tokens == whole.all_special_tokens


def test_other_tokenizers_are_refused():
    with pytest.raises(UsageError, match="vocabulary of a str cannot be cut"):
        CutTokenizer("abc")


def test_a_piece_that_is_not_known_costs_what_it_did():
    """Of Unigram: the score of an unknown piece comes from the lowest one, which stays."""
    cutter = CutTokenizer(KINDS["unigram"]())
    pieces = json.loads(cutter.cut(cutter.chosen([])).to_str())["model"]["vocab"]
    before = json.loads(KINDS["unigram"]().to_str())["model"]["vocab"]
    assert min(score for _, score in pieces) == min(score for _, score in before)
