"""Gates that follow the input: each opens other channels. They saved no milliseconds so far."""

from l0prune.doors import Feature

FEATURE = Feature(
    __name__,
    needs=("exits",),
    names={
        "InputMacs": "macs",
        "add_input_gates": "adding",
        "input_macs": "macs",
        "input_penalty": "network",
        "save_skipping": "skip_file",
    },
    around={"input_gates": "network"},
    sections={"input_gates": "recipe"},
    more={"gate": "options", "export": "options"},
    options={"Gates": ("input_gates",), "Output": ("skipping",)},
)
