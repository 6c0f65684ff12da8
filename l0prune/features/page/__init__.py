"""The page of a report: a single HTML file, rendered from the report's content alone."""

from l0prune.doors import Feature

FEATURE = Feature(__name__, functions={"html": "html"})
