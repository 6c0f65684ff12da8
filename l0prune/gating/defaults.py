"""How gates are put on where nobody says otherwise: from Python, the command line or a recipe."""

KIND = "hard-concrete"
OPEN_PROBABILITY = 0.99  # log α ≈ 3 with the default gate, whose eval value is then exactly 1
JITTER = 0.01  # as in the paper
SEED = 0
KEEP_CLASS = True
BRANCHES = None  # those that are included
INCLUDE: tuple[str, ...] = ("*",)
EXCLUDE: tuple[str, ...] = ()
