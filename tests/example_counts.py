"""How many examples a property is tried on, where that is not what ``conftest`` says for all."""

from hypothesis import settings

# An example takes a tenth of a second or more.
costly = settings(max_examples=settings().max_examples // 4)
# It takes a second or more.
costliest = settings(max_examples=settings().max_examples // 8)
