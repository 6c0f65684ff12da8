"""A model that was captured in parts has no one time."""

from __future__ import annotations

from collections.abc import Sequence

from l0prune.errors import UsageError


def check_whole(parts: Sequence[str]) -> None:
    """Refuse a model of which there are several networks.

    Args:
        parts: paths of the modules that became one each.

    Raises:
        UsageError: they are several.
    """
    if len(parts) == 1:
        return
    paths = ", ".join(map(repr, parts[:3]))
    raise UsageError(
        f"this model becomes {len(parts)} networks ({paths}, …), since it could only be captured "
        "in parts: there is no one time of it. Gate and measure one of these submodules, or mend "
        "what the survey names as the reason"
    )
