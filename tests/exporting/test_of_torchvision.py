"""Networks of torchvision are found by name, without a download."""

import socket
import urllib.request
from types import SimpleNamespace

import pytest
import torch

from l0prune.exporting.own_class.origin import _of_torchvision
from l0prune.files.user_code import torchvision_model


@pytest.mark.parametrize(
    "name",
    [
        "ssdlite320_mobilenet_v3_large",  # of a class in another file than its builder
        "fcos_resnet50_fpn",
        "lraspp_mobilenet_v3_large",
        "regnet_x_400mf",  # whose builder computes with tensors
        "resnet18",
    ],
)
@pytest.mark.one_in(3)
def test_no_name_is_found_over_the_network(name, monkeypatch):
    """Builders fetch the weights of a backbone unless they are told not to."""
    pytest.importorskip("torchvision")

    def fetched(*_, **__):
        raise AssertionError("something was to be fetched")

    monkeypatch.setattr(socket.socket, "connect", fetched)
    monkeypatch.setattr(urllib.request, "urlopen", fetched)
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetched)
    model = torchvision_model(name)
    shapes = {n: SimpleNamespace(old=list(t.shape)) for n, t in model.state_dict().items()}
    assert list(_of_torchvision(SimpleNamespace(shapes=shapes), model)) == [name]
