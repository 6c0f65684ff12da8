"""The page: one file of HTML, from the content of a report alone."""
