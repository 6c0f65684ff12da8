"""Page of a report: a single HTML file, rendered from the report's content alone."""
