"""Text as data: its windows, its parts, its tokenizer."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.data.text import load_windows, source_of, tokenizer_of, windows
from l0prune.errors import DataError, UsageError


class Letters:
    """A tokenizer of letters, with a token 1 before and 2 after each text, as BERT has."""

    def __init__(self, before=(), after=()):
        self.before, self.after = list(before), list(after)

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(letter) for letter in text]
        return {"input_ids": self.before + ids + self.after if add_special_tokens else ids}


def written(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def test_windows_are_full_and_in_order():
    rows = windows(["abcdefg", "hij"], Letters(), 4)
    joined = [ord(letter) for letter in "abcdefg\n\nhij"]
    assert rows.tolist() == [joined[:4], joined[4:8], joined[8:12]]


def test_every_window_has_the_tokens_that_are_put_around_a_text():
    rows = windows(["abcdefgh"], Letters([1, 7], [2]), 7)
    assert rows.tolist() == [[1, 7, *map(ord, "abcd"), 2], [1, 7, *map(ord, "efgh"), 2]]


def test_a_text_shorter_than_a_window_is_one():
    assert windows(["abc"], Letters([1]), 100).tolist() == [[1, *map(ord, "abc")]]


def test_without_text_there_are_no_windows():
    with pytest.raises(DataError, match="fewer than two tokens"):
        windows([""], Letters(), 8)
    with pytest.raises(UsageError, match="give at least 5"):
        windows(["abc"], Letters([1], [2, 3]), 4)


@pytest.mark.parametrize("spec", ["a.txt", "text:a", "a.txt:256", "a.txt,b.txt", "text:a,b:64"])
def test_what_names_a_text(spec):
    paths, length = source_of(spec)
    assert [path.stem for path in paths] in (["a"], ["a", "b"])
    assert length == int(spec.rpartition(":")[2] if spec[-1].isdigit() else 1024)


@pytest.mark.parametrize("spec", ["mnist", "imagefolder:x", "a.py:f", "a.txt,b.txt,c.txt", "a:64"])
def test_what_names_no_text(spec):
    assert source_of(spec) is None


def test_a_folder_that_holds_text_files_is_a_text(tmp_path):
    assert source_of(str(tmp_path)) is None
    assert source_of(str(written(tmp_path, a="b")))[0] == [tmp_path]


def test_every_eighth_file_is_for_the_test(tmp_path):
    folder = written(tmp_path, **{f"f{n:02}": chr(97 + n) * 30 for n in range(17)})
    train, test = load_windows([folder], Letters(), 8)
    assert set(test.flatten().tolist()) == {10, *map(ord, "hp")}
    assert set(train.flatten().tolist()) == {10, *map(ord, "abcdefgijklmnoq")}


def test_of_few_files_the_last_windows_are_for_the_test(tmp_path):
    folder = written(tmp_path, a="x" * 98)
    train, test = load_windows([folder / "a.txt"], Letters(), 10)
    assert (len(train), len(test)) == (7, 2)


def test_folders_of_parts_and_two_paths_are_taken_as_they_are(tmp_path):
    train, test = written(tmp_path / "train", a="aaaa"), written(tmp_path / "val", b="bbbb")
    for paths in ([tmp_path], [train, test], [train / "a.txt", test / "b.txt"]):
        found = load_windows(paths, Letters(), 8)
        assert [set(part.flatten().tolist()) for part in found] == [{97}, {98}]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\xff", "UTF-8"), (b"too short", "only one window"), (None, "a.txt does not exist")],
)
def test_files_that_cannot_be_used(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_windows([tmp_path / "a.txt"], Letters(), 64)


def test_a_tokenizer_is_found_where_a_model_came_from(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    model = nn.Linear(1, 1)
    model.name_or_path = str(tmp_path / "model")
    text = written(tmp_path, a="one two two " * 40) / "a.txt"
    for given in (model, model.name_or_path, tokenizer_of(model)):
        source = l0prune.load_data(f"{text}:6", tokenizer=given)
        assert source.train.inputs[0].tolist() == [1, 2, 2, 1, 2, 2]
        assert torch.equal(source.train.inputs, source.train.targets)
        assert (source.loss, source.metric, source.name) == (
            "next-token",
            "perplexity",
            f"{text}:6",
        )


class Reads(nn.Module):
    """As transformers' classifiers are: a mask among the inputs, and no output embeddings."""

    def __init__(self, embeddings=None):
        super().__init__()
        self.embeddings = embeddings

    def get_output_embeddings(self):
        return self.embeddings

    def forward(self, input_ids, attention_mask=None):
        return input_ids


def words(**options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {"[PAD]": 0, "[UNK]": 1, "one": 2, "two": 3}
    found = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, **options)


@pytest.mark.parametrize(
    ("text", "spec", "ids", "mask"),
    [
        ("one two\n\n two\none one two", "", [[2, 3, 0], [3, 0, 0], [2, 2, 3]], [2, 1, 3]),
        ("one two\none one two", ":2", [[2, 3], [2, 2]], None),
        ("one two\ntwo one\n", "", [[2, 3], [3, 2]], None),
        ("one\n" + "two " * 9, "", [[2, 0, 0, 0, 0], [3] * 5], [1, 5]),
    ],
)
def test_a_classifier_reads_each_line_padded_with_a_mask_where_lengths_differ(
    tmp_path, text, spec, ids, mask
):
    text = written(tmp_path, a=text) / "a.txt"
    tokenizer = words(pad_token="[PAD]", model_max_length=5)
    found = l0prune.load_data(f"{text}{spec}", tokenizer=tokenizer, model=Reads())
    expected = {"input_ids": ids}
    if mask is not None:
        expected["attention_mask"] = [
            [int(n < count) for n in range(len(ids[0]))] for count in mask
        ]
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected
    predicts = l0prune.load_data(f"{text}:2", tokenizer=tokenizer, model=Reads(nn.Linear(1, 1)))
    assert predicts.loss == "next-token"


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "MPNet"])
def test_texts_are_as_long_as_the_model_takes(tmp_path, kind):
    """Two of these count positions from the number of the padding token, 1: ten are for eight."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 10, "vocab_size": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=1, is_decoder=False)
    text = written(tmp_path, a="one\n" + "two " * 60) / "a.txt"
    tokenizer, most = words(pad_token="[UNK]"), 10 if kind == "Bert" else 8
    for head in ("SequenceClassification", "MaskedLM"):
        model = getattr(transformers, f"{kind}For{head}")(config).eval()
        found = l0prune.load_data(str(text), tokenizer=tokenizer, model=model)
        ids = found["input_ids"] if head != "MaskedLM" else found.train.inputs
        assert ids.shape[1] == most
        model(ids)


def test_a_token_that_the_model_does_not_know_makes_no_text_shorter(tmp_path):
    class Knows(Reads):
        def forward(self, input_ids, attention_mask=None):
            return torch.zeros(3, 2)[input_ids]

    text = written(tmp_path, a="one two two\n" * 2) / "a.txt"
    found = l0prune.load_data(str(text), tokenizer=words(), model=Knows())
    assert found["input_ids"].tolist() == [[2, 3, 3]] * 2


def test_a_folder_with_a_model_and_no_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.BertConfig().save_pretrained(tmp_path)  # of which transformers makes one
    with pytest.raises(UsageError, match=r"no tokenizer in .*: its files are missing"):
        tokenizer_of(tmp_path)


def test_lines_that_cannot_be_padded_or_are_not_there(tmp_path):
    folder = written(tmp_path, a="one two\none", b="\n \n", c="one\ntwo")
    for name, error, message in (
        ("a", UsageError, "no padding token"),
        ("b", DataError, "no line"),
    ):
        with pytest.raises(error, match=message):
            l0prune.load_data(str(folder / f"{name}.txt"), tokenizer=words(), model=Reads())
    found = l0prune.load_data(str(folder / "c.txt"), tokenizer=words(), model=Reads())
    assert found["input_ids"].tolist() == [[2], [3]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "has to be tokenized"),
        (nn.Linear(1, 1), "has to be tokenized"),
        ("/no/such", "in /no"),
    ],
)
def test_without_a_tokenizer_the_way_on_is_named(given, message):
    with pytest.raises(UsageError, match=f"{message}.*--tokenizer"):
        tokenizer_of(given)
