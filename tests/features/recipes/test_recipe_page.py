"""The page on recipes has every section and key, made from the settings."""

import re
from pathlib import Path

from pydantic_core import PydanticUndefined

from l0prune.features.recipes.files import WHOLE
from l0prune.training.fields import allowed, model_in, summary
from l0prune.training.settings import DenseSettings, Settings

PAGE = Path(__file__).parents[3] / "docs/howto/recipes.md"
START = "## All sections and keys\n"
ORDER = ["model", "data", "dense", "gate", "finetune", "fit", "rounds", "recover"]
VALUES = {"lam": "a number, a text or a table", "budget": "a text, a list of texts or a table"}
SETTINGS = {
    "dense": ("Keys of all training, with or without gates:", DenseSettings.model_fields),
    "finetune": (
        "All keys of `[dense]`, and these:",
        {k: v for k, v in Settings.model_fields.items() if k not in DenseSettings.model_fields},
    ),
    "recover": ("The keys of `[dense]`.", {}),
}


def generated():
    """The part of the page that is made from the settings."""
    fields = dict(sorted(WHOLE.model_fields.items(), key=lambda each: _order(each[0])))
    top = {name: field for name, field in fields.items() if not _is_section(name)}
    parts = [START, "At the top of the file, before the first section:\n", *_table(top)]
    for name in filter(_is_section, fields):
        head = f"[[{name}]]" if name == "rounds" else f"[{name}]"
        parts += [f"\n### `{head}`\n", f"{fields[name].description}\n"]
        if name in SETTINGS:
            about, keys = SETTINGS[name]
            parts += [f"{about}\n", *_table(keys)] if keys else [about]
        elif name == "rounds":
            parts.append("Each has sections `gate`, and `fit` or `finetune`, as below.")
        else:
            parts += _table(model_in(fields[name]).model_fields)
    return "\n".join(parts) + "\n"


def _is_section(name):
    return name in SETTINGS or model_in(WHOLE.model_fields[name]) is not None


def _table(fields):
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        if values := _values(name, field):
            about = summary(field).replace("|", "\\|")
            yield f"| `{name}` | {values} | {_default(name, field)} | {about} |"


def _order(name):
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _values(name, field):
    """The values that a key may have, without what TOML has none of, and without huge bounds."""
    text = allowed(field) or VALUES.get(name, "")
    text = re.sub(r" or a (function|path)|None, ", "", text)
    text = re.sub(r" from (\S+) to (1e\+12|[\d,]{9,})", r" of at least \1", text)
    text = re.sub(r" and of at most 1e\+12", "", text)
    return text.replace("|", "\\|")


def _default(name, field):
    if name == "name":
        return "the file's name"
    if field.default is PydanticUndefined:
        return "required" if field.is_required() else ""
    if field.default in (None, "", ()) or field.default == []:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"`{list(field.default) if isinstance(field.default, tuple) else field.default}`"


def test_the_page_has_all_sections_and_keys_as_they_are():
    assert START + PAGE.read_text().partition(START)[2] == generated(), f"python {__file__}"


def test_every_key_of_a_section_has_a_description():
    sections = [WHOLE, *filter(None, map(model_in, WHOLE.model_fields.values()))]
    for section in sections:
        assert all(field.description for field in section.model_fields.values()), section


def test_all_settings_that_a_text_can_hold_are_on_the_page():
    shown = set(re.findall(r"^\| `(\w+)` \|", generated(), re.MULTILINE))
    objects = {"teacher", "latency"}  # these are made in Python, or by the run
    assert {*Settings.model_fields} - shown == objects


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(START)[0].rstrip("\n") + "\n\n" + generated())
