"""Early exits: heads by which easy inputs leave early. They paid on digits, not on a ResNet-20."""

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
