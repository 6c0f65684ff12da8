"""What a pickle names."""

import zipfile
from pickletools import genops


def names_in(file):
    """What the pickle in a file of torch imports: each module and name in it."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("data.pkl"))
        pickle = archive.read(name)
    found = [str(argument) for code, argument, _ in genops(pickle) if code.name == "GLOBAL"]
    assert found
    return found
