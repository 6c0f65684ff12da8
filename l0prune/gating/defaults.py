"""Defaults of ``gate``, for Python, the command line and recipes."""

KIND = "hard-concrete"
OPEN_PROBABILITY = 0.99  # log α ≈ 3 with the default gate, whose eval value is then exactly 1
JITTER = 0.01  # as in the paper
SEED = 0
KEEP_CLASS = True
BRANCHES = None  # those that are included
INCLUDE: tuple[str, ...] = ("*",)
EXCLUDE: tuple[str, ...] = ()
KEEP: tuple[str, ...] = ()
UNIFORM = False
OUTPUTS: tuple[str, ...] = ()
LOADABLE_BY = None  # any program that l0prune writes for
