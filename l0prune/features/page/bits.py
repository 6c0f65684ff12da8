"""Picture of learned bits: two bars for each layer."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from l0prune.features.page.elements import column, drawing, element, is_narrow, short, text, titled
from l0prune.report.content import LayerBits

_BAR, _GAP, _ROOM = 11, 3, 34  # pixels: height of a bar, gap between two, space for the number


def bits_by_layer(layers: Sequence[LayerBits], width: int) -> Markup:
    """Draw the bits of the weights of each layer, and below those of its input."""
    narrow = is_narrow(width)
    label = 0.0 if narrow else column(layer.name for layer in layers)
    top = 18 if narrow else 0
    row = top + 2 * _BAR + _GAP + 9
    most = max(max(layer.weight, layer.input) for layer in layers)
    unit = (width - label - _ROOM) / most
    drawn = []
    for number, layer in enumerate(layers):
        y, name = row * number, layer.name or "the model"
        parts = [text(0, y + 14, short(name, 30 if narrow else 44), class_="label")]
        for place, (bits, kind) in enumerate(((layer.weight, "kept"), (layer.input, "was"))):
            at = y + top + place * (_BAR + _GAP)
            size = {"width": bits * unit, "height": _BAR, "rx": 2}
            parts.append(element("rect", x=label, y=at, class_=kind, **size))
            parts.append(text(label + bits * unit + 6, at + 10, str(bits), class_="value"))
        drawn.append(titled(f"{name}: weights {layer.weight}, input {layer.input} bits", *parts))
    return drawing(width, row * len(layers) + 4, "Bits of weights and inputs by layer", *drawn)
