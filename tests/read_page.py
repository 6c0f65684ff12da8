"""A page as it was saved, to be read back: what its pictures show, and the data beside it."""

import json
import re
from xml.etree import ElementTree

import pytest
from reported import content, epoch, owner

from l0prune.report.content import Pair

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = 0.11  # positions are written to a tenth of a point

both = pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])

# MACs of all steps up to the end of each epoch of ten: after the first, 60 and 45 % of a step.
WORK = {1: 10.0, 2: 16.0, 3: 20.5}


def varied():
    """A run in which no two numbers are alike, with several outputs and a layer that got slower."""
    made = content("conv1")
    epochs = [
        epoch(n, phase).model_copy(
            update={
                "train_loss": 1 / (n + 0.3),
                "test_loss": 1.7 / (n + 0.1),
                "metric": 0.4 / n**1.1,
                "gates": [7 * n, n, 3, *[0] * 14, 2 * n, 5, 40 - n],
                "training_macs": WORK[n] / (10 * n),
            }
        )
        for n, phase in enumerate(("warm-up", "prune", "settle"), start=1)
    ]
    training = made.trainings[0].model_copy(update={"epochs": epochs})
    checks = [
        check.model_copy(update={"error": max(of.values()), "outputs": of})
        for check, of in zip(
            made.certificate,
            ({"a": 2e-8, "b": 3e-7}, {"a": 5e-8, "b": 0.0}, {}, {}),
            strict=True,
        )
        if of
    ] + made.certificate[2:]
    owners = [owner("conv1", 5, 1.5, 0.75), owner("b", 3, 3.4, 0.5), owner("c", 1, 1.001, 0.1)]
    time = made.time.model_copy(update={"owners": owners})
    gain = made.gain.model_copy(update={"macs": Pair(before=3100, after=1300)})
    parts = {"trainings": [training], "certificate": checks, "time": time, "gain": gain}
    return made.model_copy(update=parts)


class Page:
    """A page as it was saved, and the data that was written beside it.

    Attributes:
        text: the HTML.
        data: ``report.json``, as JSON reads it.
    """

    def __init__(self, report, folder):
        page, data = report.save(folder)
        self.text, self.data = page.read_text(), json.loads(data.read_text())
        self._pictures = {}
        for section in self.text.split("<section")[1:]:
            name = re.search(r'aria-label(?:ledby)?="([^"]+)"', section)[1]
            for kind in ("wide", "narrow"):
                drawn = re.findall(rf'<div class="{kind}">(<svg.*?</svg>)</div>', section)
                self._pictures[name, kind] = list(map(ElementTree.fromstring, drawn))

    def pictures(self, section, wide):
        """Those of a section, for wide or for narrow screens."""
        return self._pictures.get((section, "wide" if wide else "narrow"), [])

    def picture(self, section, start, wide):
        """The one whose title starts so."""
        (found,) = [p for p in self.pictures(section, wide) if titled(p).startswith(start)]
        return found

    def sections(self):
        """Each training with the name of its section."""
        done = [training for training in self.data["trainings"] if training["epochs"]]
        return [(f"training{n}", training) for n, training in enumerate(done, start=1)]


def titled(picture):
    return picture.find(f"{SVG}title").text


def groups(picture):
    """What is under a title of its own, by that title, in order."""
    return [
        (title.text, group)
        for group in picture.iter(f"{SVG}g")
        if (title := group.find(f"{SVG}title")) is not None
    ]


def of_class(node, tag, name):
    return [e for e in node.iter(SVG + tag) if name in (e.get("class") or "").split()]


def at(element, name):
    return float(element.get(name))


def scale(places):
    """From a position to a value, by the two outermost of (position, value)."""
    (x0, v0), (x1, v1) = min(places), max(places)
    return lambda x: v0 + (x - x0) * (v1 - v0) / (x1 - x0), abs(v1 - v0) / (x1 - x0) * DRAWN


def number(text):
    factor = {"k": 1e3, "M": 1e6}.get(text[-1], 1)
    return float(text.rstrip(" kM%").replace(",", "")) * factor
