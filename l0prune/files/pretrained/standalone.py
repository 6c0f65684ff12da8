"""Gives a model that your own code built the new sizes and weights of its smaller self.

    from l0prune_model import resize
    model = resize(MyModel(), "folder")

MyModel() is the model as it was before it was cut. This needs torch and safetensors.
"""

import json
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file
from torch import Tensor, nn

from l0prune.files.pretrained.layers import change, tensors_of

Model = TypeVar("Model", bound=nn.Module)


def resize(model: Model, folder: str | Path) -> Model:
    """The same object with the sizes and weights in the folder.

    Raises:
        ValueError: the folder is of another model, or from a newer version; the model is then as
            it was.
    """
    manifest = json.loads((Path(folder) / "l0prune.json").read_text(encoding="utf-8"))
    if manifest["version"] != 1:
        raise ValueError(f"{folder} was written by a newer l0prune")
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors |= {name: tensors[first] for name, first in manifest["tied"].items()}
    held = {
        f"{path}.{leaf}" if path else leaf: old
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf, old in tensors_of(module)
    }
    new: dict[int, Tensor] = {}
    for name, sizes in {**manifest["shapes"], **manifest["constants"]}.items():
        old = held.get(name)
        if old is None or list(old.shape) != sizes["old"]:
            raise ValueError(f"{folder} is of another model: {name} is not {sizes['old']} in this")
        tensor = tensors[name].to(old.device)
        if isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
        new.setdefault(id(old), tensor)
    for module in model.modules():
        for leaf, old in list(tensors_of(module)):
            if id(old) in new:
                setattr(module, leaf, new[id(old)])
    change(model, manifest["layers"], manifest["attributes"], tensors, manifest["dropped"])
    return model
