"""``l0prune.shrink_vocabulary``: a model and its tokenizer with the tokens that a text needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.capture import capture
from l0prune.capture.compat import pytree
from l0prune.capture.configurations import put_size, sizes_of
from l0prune.capture.copying import copied_around
from l0prune.capture.example_inputs import keep, plain
from l0prune.capture.sizes import Inputs
from l0prune.data.dataset import as_arguments
from l0prune.data.text import texts_in, tokenizer_of
from l0prune.doors import provided
from l0prune.errors import UsageError
from l0prune.exporting.certify.answers import Answer, answers_of
from l0prune.exporting.certify.certificate import Check
from l0prune.exporting.own_class.choice import own_class, proven
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.tensors import cut, stored_in
from l0prune.features.vocabulary.cut_tokenizer import CutTokenizer, renewed
from l0prune.features.vocabulary.numbers import renumber, token_ids_in
from l0prune.features.vocabulary.result import SmallerVocabulary
from l0prune.features.vocabulary.tables import Vocabulary, vocabulary_of
from l0prune.files.model_sources import parse_input
from l0prune.gating.attaching import check_ungated
from l0prune.infer.own_code import with_code
from l0prune.plan.layout import axes_of
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage

_PADDING = "padding_idx"


@displayed
def shrink_vocabulary(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    text: str | Path | Iterable[str | Path] | None = None,
    ids: Iterable[int] | None = None,
    size: int | None = None,
    inputs: Any = None,
    progress: bool = True,
) -> SmallerVocabulary:
    """Cut a model's vocabulary to the tokens that a text needs, and its tokenizer with it.

    Rows of the embedding and of the head (tied or not) are removed, with their logits. Remaining
    ids are renumbered in order. The result is exact: a text that the tokenizer encodes with kept
    tokens only is encoded with the same tokens, and the smaller model gives the same logits for
    these, which is verified on examples. Other text is encoded with the remaining tokens.

    Special tokens stay, those that the configuration names, and tokens that others are made of.

    Args:
        model: of its own class, without gates: cut the vocabulary first. It stays as it is.
        tokenizer: one of ``tokenizers``, or of transformers that works with such a one, or a name
            or folder of one. By default that of the model.
        text: a text, paths of files and folders of text, or several of both: the tokens that occur
            in it stay, or the most frequent of them where a ``size`` is given.
        ids: tokens that stay, in place of a text or beside it.
        size: of the new vocabulary, exactly.
        inputs: examples of what the model takes. By default they are guessed.
        progress: show progress on stderr.

    Raises:
        UsageError: the tokenizer is of another kind or of another model, the size is too small,
            no table is read by ids, or the model's class cannot be had at these sizes.
        AlreadyGated: the model carries gates.
        CaptureError: torch.export cannot follow the model.
        CertificateError: the smaller model computes something else.
    """
    check_ungated(model)
    if text is None and ids is None:
        raise UsageError("say which tokens stay: by a text (text=…), or by their ids (ids=…)")
    known = tokenizer if hasattr(tokenizer, "encode_batch") else tokenizer_of(tokenizer or model)
    cutter = CutTokenizer(known)
    counts = cutter.count(() if text is None else _texts(text))
    chosen = _chosen(cutter, counts, [] if ids is None else list(ids), size, token_ids_in(model))
    was_training = model.training
    found = _captured(model, cutter, inputs)
    module, checks = _cut_model(model, found, chosen, frozenset(cutter.required))
    module.train(was_training)
    whole = sum(counts.values())
    kept = set(chosen)
    covered = sum(count for number, count in counts.items() if number in kept)
    return SmallerVocabulary(
        module,
        renewed(known, cutter.cut(chosen)),
        torch.tensor(chosen),
        tuple(cutter.tokens.get(number, "") for number in range(found.rows)),
        params_before=sum(each.numel() for each in model.parameters()),
        coverage=covered / whole if whole else None,
        checks=checks,
    )


def _texts(text: str | Path | Iterable[str | Path]) -> Iterable[str]:
    for each in (text,) if isinstance(text, str | Path) else text:
        yield from texts_in(each) if isinstance(each, Path) else (each,)


def _chosen(
    cutter: CutTokenizer,
    counts: Counter[int],
    ids: Sequence[int],
    size: int | None,
    named: set[int],
) -> list[int]:
    """Return the ids that stay, ascending."""
    strange = [number for number in ids if number not in cutter.tokens]
    if strange:
        raise UsageError(
            f"the tokenizer has no token of the id {strange[0]}: its ids are those of "
            f"{len(cutter.tokens):,} tokens"
        )
    if size is not None and size > len(cutter.tokens):
        raise UsageError(
            f"a vocabulary of {size:,} tokens is none that is smaller: the tokenizer has "
            f"{len(cutter.tokens):,}"
        )
    order = [number for number, _ in counts.most_common()]
    more = [*ids, *(number for number in sorted(named) if number in cutter.tokens)]
    return cutter.chosen(order, size, more)


@dataclass(frozen=True)
class _Captured:
    """A captured model with the axis of its vocabulary.

    Attributes:
        vocabulary: of the captured graph.
        example: inputs that the model was captured with.
        is_guessed: whether the example was guessed, without ids of the user's.
        places: indices of the tensors in the example that are ids.
    """

    vocabulary: Vocabulary
    example: Inputs
    is_guessed: bool
    places: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of rows before the cut."""
        return self.vocabulary.analysis.plan.size


def _captured(model: nn.Module, cutter: CutTokenizer, inputs: Any) -> _Captured:
    given = (
        parse_input(provided("guess_example")(model).text)
        if inputs is None
        else as_arguments(inputs)
    )
    example = keep(model, *given)
    with stage("capturing the model"):
        captured = capture(model, *example)
    vocabulary = vocabulary_of(captured, max(cutter.tokens) + 1)
    analysis = with_code(vocabulary.analysis, model)
    places = tuple(captured.inputs.index(name) for name in vocabulary.inputs)
    assert len(captured.inputs) == len(pytree.tree_leaves(plain(example)))
    return _Captured(replace(vocabulary, analysis=analysis), example, inputs is None, places)


_CAUSE = (
    "code that has an id or the number of tokens written into it, or computes a softmax over all "
    "tokens: let it return logits, and take its numbers from its attributes"
)


@stage("cutting the vocabulary")
def _cut_model(
    model: nn.Module, found: _Captured, chosen: Sequence[int], special: frozenset[int]
) -> tuple[nn.Module, tuple[Check, ...]]:
    """Return the model of its own class at the new size, and the comparisons that it passed."""
    plan, numbers = found.vocabulary.analysis.plan, torch.tensor(chosen)
    kept = torch.zeros(plan.size, dtype=torch.bool).index_fill_(0, numbers, True)
    new = {old: number for number, old in enumerate(chosen)}
    settled = copied_around(model).eval()
    tensors = {}
    sizes = sizes_of(model)
    for name, dims in plan.tensors.items():
        stored = stored_in(settled, name)
        if stored is None or not any(map(axes_of, dims)):
            continue
        tensors[name] = cut(plan, dims, stored.detach(), kept)
        for other in (name, *(alias for alias, first in plan.aliases.items() if first == name)):
            sizes |= {(other, dim): size for dim, size in enumerate(tensors[name].shape)}
    _set_padding(settled, tensors, new)
    renumber(settled, new)
    put_size(settled, sizes, plan.size, len(chosen))
    answers = _answers(model, found, numbers, special)
    slots = KeptSlots(plan, kept.double(), kept)
    own = own_class(settled, slots, tensors)
    smaller, checks = proven(own, answers, "vocabulary", _CAUSE)
    _forget_tokenizer(smaller)
    return smaller, checks


def _set_padding(
    settled: nn.Module, cut_ones: Mapping[str, Tensor], new: Mapping[int, int]
) -> None:
    """Set the new id of padding, whose row gets no gradient, in embedding tables, in place."""
    tables = {id(stored_in(settled, name)) for name in cut_ones}
    for module in settled.modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        padding: Any = getattr(module, _PADDING, None) if is_table else None
        if padding is not None and id(module.weight) in tables:
            setattr(module, _PADDING, new.get(padding))


def _answers(
    model: nn.Module,
    found: _Captured,
    kept: Tensor,
    special: frozenset[int],
) -> tuple[Answer, ...]:
    """Return the logits of the model for kept tokens, which the smaller model has to match.

    Inputs are the example with kept tokens drawn for all others, and the example with kept tokens
    drawn for all but special tokens.
    """
    generator = torch.Generator().manual_seed(0)
    common = torch.tensor([number for number in kept.tolist() if number not in special])
    common = common if len(common) else kept
    new = torch.full((found.rows,), -1).index_copy_(0, kept, torch.arange(len(kept)))
    fixed = torch.zeros(found.rows, dtype=torch.bool)
    if not found.is_guessed:  # a guessed example has no ids of the user's
        fixed[list(special)] = True

    def drawn(ids: Tensor, stay: Tensor) -> Tensor:
        at = torch.randint(len(common), ids.shape, generator=generator)
        return torch.where(stay.to(ids.device)[ids.long()], ids, common[at].to(ids))

    def renumbered(ids: Tensor) -> Tensor:
        return new.to(ids)[ids.long()]

    given = [
        _with_ids(found, found.example, partial(drawn, stay=each)) for each in (new >= 0, fixed)
    ]
    return tuple(
        replace(
            answer,
            inputs=_with_ids(found, answer.inputs, renumbered),
            exact=_of_kept(found, answer.exact, kept),
            single=_of_kept(found, answer.single or (), kept),
        )
        for answer in answers_of(copied_around(model).eval(), given)
    )


def _with_ids(found: _Captured, given: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return the inputs with ids changed by a function."""
    leaves, structure = pytree.tree_flatten(given)
    changed = [
        change(leaf) if number in found.places else leaf for number, leaf in enumerate(leaves)
    ]
    inputs: Inputs = pytree.tree_unflatten(changed, structure)
    return inputs


def _of_kept(found: _Captured, output: Sequence[Any], kept: Tensor) -> list[Any]:
    """Return the values of an output, reduced to the logits of the tokens that stay."""
    dims = iter(found.vocabulary.outputs)
    result = []
    for leaf in output:
        dim = next(dims, None) if isinstance(leaf, Tensor) else None
        is_cut = dim is not None
        result.append(leaf.index_select(dim, kept.to(leaf.device)) if is_cut else leaf)
    return result


def _forget_tokenizer(module: nn.Module) -> None:
    """Clear the name by which a model of transformers finds the whole tokenizer, in place."""
    for holder, name in (
        (getattr(module, "config", None), "_name_or_path"),
        (module, "name_or_path"),
    ):
        if name in vars(holder or object):
            setattr(holder, name, "")
