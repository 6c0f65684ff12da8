"""Early exits: heads that answer inside of a network, and files that are left where one is sure."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    names={"EarlyExits": "early_exits", "add_exits": "adding", "choose_exits": "early_exits"},
    around={"exits": "network"},
    criteria=dict.fromkeys(("confidence", "entropy", "patience"), "criteria"),
    sections={"exits": "recipe"},
    more={"gate": "options", "export": "options"},
    options={"Output": ("exits",)},
)
