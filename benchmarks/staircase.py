"""The picture of a staircase: the time of a depthwise convolution over its width.

    python -m benchmarks.staircase [--out docs/staircase.svg]

A 1×1 convolution to the width, a depthwise 3×3 of 56×56, a 1×1 back to 32 channels: three nodes in
one file for each width, run by ONNX Runtime on one thread; the picture is of the three together.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx

from benchmarks.runner import machine, options
from l0prune.exporting.onnx import collect

CHANNELS, SIDE = 32, 56
WIDTHS = range(64, 129)
WIDE, HIGH, LEFT, BOTTOM = 640, 300, 56, 40


def network(width: int) -> onnx.ModelProto:
    """The three convolutions."""
    shape = f"float[1, {CHANNELS}, {SIDE}, {SIDE}]"
    file = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
        staircase ({shape} x) => ({shape} y) {{
            p = Conv(x, a)
            q = Conv<group = {width}, pads = [1, 1, 1, 1]>(p, b)
            y = Conv(q, c)
        }}""")
    rng = np.random.default_rng(0)
    sizes = {"a": (width, CHANNELS, 1, 1), "b": (width, 1, 3, 3), "c": (CHANNELS, width, 1, 1)}
    for name, dims in sizes.items():
        weight = rng.standard_normal(dims, dtype=np.float32) / 8
        file.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return file


def times() -> dict[int, float]:
    """Microseconds by width."""
    inputs = {"x": np.random.default_rng(1).standard_normal((1, CHANNELS, SIDE, SIDE), np.float32)}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for width in WIDTHS:
            path = Path(folder) / f"{width}.onnx"
            onnx.save(network(width), str(path))
            session = collect.Network(path, 1, collect.CPU)
            session.median(inputs, 20)
            found[width] = 1e3 * min(session.median(inputs, 40) for _ in range(3))
    return found


def picture(found: dict[int, float]) -> str:
    """The times as SVG; multiples of 16 are filled."""
    top = max(found.values()) * 1.08

    def at(width: float, time: float) -> tuple[float, float]:
        x = LEFT + (width - WIDTHS[0]) / (WIDTHS[-1] - WIDTHS[0]) * (WIDE - LEFT - 16)
        return x, HIGH - BOTTOM - time / top * (HIGH - BOTTOM - 16)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" role="img" '
        'font-family="sans-serif" font-size="12">',
        "<title>Time of a depthwise block over its width: a fast path where the width is a "
        "multiple of 16</title>",
        f'<rect width="{WIDE}" height="{HIGH}" fill="#ffffff"/>',
    ]
    step = 10 ** np.floor(np.log10(top / 3))
    for time in np.arange(0, top, step * np.ceil(top / step / 6)):
        x, y = at(WIDTHS[0], time)
        parts.append(f'<path d="M{x} {y:.1f}H{WIDE - 16}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{time:.0f}</text>')
    for width in WIDTHS[::16]:
        x, y = at(width, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{width}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in found.items()))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#888888"/>')
    for width, time in found.items():
        x, y = at(width, time)
        fill = "#1f5fa8" if width % 16 == 0 else "#ffffff"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{fill}" stroke="#1f5fa8"/>')
    parts.append(
        f'<text x="{(WIDE + LEFT) / 2}" y="{HIGH - 6}" text-anchor="middle">channels of the '
        "depthwise convolution; multiples of 16 are filled</text>"
    )
    middle = (HIGH - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">µs</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    given = options(__doc__, threads=None, out=Path("docs/staircase.svg"))
    found = times()
    given.out.write_text(picture(found), encoding="utf-8")
    for width in (80, 89, 95, 96, 97, 112):
        print(f"{width:4} channels: {found[width]:6.0f} µs")
    print(f"{given.out} written; {machine()}, timed on one")


if __name__ == "__main__":
    main()
