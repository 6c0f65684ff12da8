"""What transformers' collators and ``datasets`` give is data as it is, of models of their own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import l0prune
from l0prune.errors import DataError, UsageError

transformers = pytest.importorskip("transformers", reason="pip install 'l0prune[transformers]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks
WORDS, CLASSES = 20, 3
QUIET = {"epochs": 2, "lam": 0, "progress": False}
generator = torch.Generator().manual_seed(0)
ROWS = [
    {"input_ids": torch.randint(3, WORDS, (5 + n % 4,), generator=generator).tolist(),
     "label": n % CLASSES}
    for n in range(23)
]  # fmt: skip


def bert(kind="BertForSequenceClassification", labels=CLASSES):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16, num_labels=labels,
    )  # fmt: skip
    return getattr(transformers, kind)(config).eval()


def gated(*args, **kwargs):
    ids = torch.ones(2, 8).long()
    return l0prune.gate(bert(*args, **kwargs), (), {"input_ids": ids, "attention_mask": ids})


def padded(rows):
    """As ``DataCollatorWithPadding`` does, which needs a tokenizer of some vocabulary."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([[*r["input_ids"], *[0] * (longest - len(r["input_ids"]))] for r in rows])
    labels = torch.tensor([row["label"] for row in rows])
    batch = {"input_ids": ids, "attention_mask": ids.gt(0).long(), "labels": labels}
    return transformers.BatchEncoding(batch)


LOADER = DataLoader(ROWS, batch_size=10, collate_fn=padded)  # 10, 10 and 3 examples


@pytest.mark.slow
def test_batches_of_a_collator_are_learned_from():
    model = gated()
    history = l0prune.finetune(model, (LOADER, LOADER), **QUIET)
    found = l0prune.evaluate(model, (LOADER, LOADER))
    with torch.no_grad():
        each = [(model(**batch), len(batch["labels"])) for batch in LOADER]
        wrong = [(y.logits.argmax(1) != b["labels"]) for (y, _), b in zip(each, LOADER)]  # noqa: B905
    assert found["test_loss"] == pytest.approx(sum(float(y.loss) * n for y, n in each) / 23)
    assert found["error"] == pytest.approx(float(torch.cat(wrong).float().mean()))
    assert history.last["test_loss"] == pytest.approx(found["test_loss"])
    assert l0prune.score(model, "taylor", LOADER).sum() > 0


@pytest.mark.slow
def test_a_collator_of_the_library():
    batches = [transformers.default_data_collator([{**r, "input_ids": [3] * 8} for r in ROWS])]
    assert "labels" in batches[0]
    assert "error" in l0prune.finetune(gated(), (batches, batches), **QUIET).last


def test_tables_of_datasets_need_no_loader():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{**row, "input_ids": [3 + n % 5] * 8} for n, row in enumerate(ROWS)]
    table = datasets.Dataset.from_list(rows).with_format("torch")
    model = gated()
    history = l0prune.finetune(model, (table, table), batch_size=8, **QUIET)
    by_loader = DataLoader(table, batch_size=8)
    assert l0prune.evaluate(model, (table, by_loader)) == pytest.approx(
        {name: history.last[name] for name in ("test_loss", "error")}
    )
    told = table.add_column("text", ["a"] * len(table))
    with pytest.raises(DataError, match="hold text, which the forward of Plain"):
        l0prune.evaluate(without_more(), (told, told))


def without_more():
    class Plain(torch.nn.Module):
        def forward(self, input_ids, labels=None):
            return input_ids

    return Plain()


@pytest.mark.slow
def test_a_regression_of_transformers_reports_its_loss_alone():
    batches = [{**batch, "labels": batch["labels"].float()} for batch in LOADER]
    history = l0prune.finetune(gated(labels=1), (batches, batches), **QUIET)
    assert history.last["test_loss"] > 0
    assert "error" not in history.last
    history = l0prune.finetune(gated(labels=1), (batches, batches), loss="l1", **QUIET)
    assert history.last["test_loss"] > 0


@pytest.mark.slow
def test_a_model_without_a_head_needs_a_loss():
    with pytest.raises(UsageError, match="not a tensor of class scores; give a loss"):
        l0prune.finetune(gated("BertModel"), LOADER, **QUIET)


@pytest.mark.slow
def test_what_is_to_be_found_may_be_two_labels():
    def where(batch):
        batch = dict(batch)
        place = batch.pop("labels")
        return {**batch, "start_positions": place, "end_positions": place}

    batches = [where(batch) for batch in LOADER]
    model = gated("BertForQuestionAnswering", 2)
    history = l0prune.finetune(model, (batches, batches), **QUIET)
    assert history.last["test_loss"] > 0
