"""Networks of torchvision and timm by their names: inputs, classes, local weights, and what is refused. No network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.published import Timm, Torchvision
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.workload import Model

SMALLEST = "shufflenet_v2_x0_5"


def outline(model: Model, shape: tuple[int, ...] = (1, 32, 32), classes: int = 7) -> Any:
    with torch.device("meta"):
        return model.build(shape, classes)


def test_a_grey_image_gives_what_three_equal_channels_give():
    nets = []
    for channels in (1, 2, 3):
        torch.manual_seed(0)
        nets.append(Torchvision(SMALLEST).build((channels, 32, 32), 7).double().eval())
    x = torch.rand(2, 1, 32, 32, dtype=torch.float64)
    grey, two, colours = (net(x.expand(-1, channels, -1, -1)) for channels, net in enumerate(nets, 1))
    assert grey.shape == (2, 7)
    assert torch.allclose(grey, colours, rtol=1e-12)
    # Of two channels the first and the second have the weights of red and green.
    assert two.shape == (2, 7)
    first, wide = nets[1].conv1[0].weight, nets[2].conv1[0].weight
    assert torch.allclose(first, wide[:, :2] * 1.5, rtol=1e-6)  # scaled in float32


def test_the_names_of_many_networks_fit():
    for network in ("resnet18", "vit_b_16", "googlenet", "swin_t", "densenet121"):
        net = outline(Torchvision(network))
        assert list(net.parameters())[-1].shape[0] == 7, network


def test_a_small_resnet_begins_without_strides():
    net = outline(Torchvision("resnet18", norm="group", small=True))
    assert (net.conv1.weight.shape, net.conv1.stride, type(net.maxpool)) == ((64, 1, 3, 3), (1, 1), nn.Identity)
    assert not list(net.buffers())
    assert outline(Torchvision("resnet18")).conv1.weight.shape == (64, 1, 7, 7)


def test_weights_come_from_a_file_and_are_recorded(tmp_path: Path):
    file = tmp_path / "trained.safetensors"
    torch.manual_seed(3)
    given: Any = Torchvision(SMALLEST).build((3, 64, 64), 1000)
    save_file(given.state_dict(), file)
    workload = Digits(model=Torchvision(SMALLEST, weights=str(file)))
    workload.check()
    assert workload.data_files().items() >= {"weights": file}.items()
    found, drawn = workload.init(0), Digits(model=Torchvision(SMALLEST)).init(0)
    assert torch.equal(found["conv1.0.weight"], given.conv1[0].weight.sum(1, keepdim=True))
    assert torch.equal(found["stage2.0.branch1.1.running_var"], given.stage2[0].branch1[1].running_var)
    assert torch.equal(found["fc.weight"], drawn["fc.weight"])  # of 10 classes, not of 1000


def test_timm_networks_have_counterparts():
    pytest.importorskip("timm")
    workload = Digits(model=Timm("efficientnet_b0", arguments={"drop_rate": 0.1, "drop_path_rate": 0.1}))
    workload.check()
    assert "BatchNormAct2d -> fedfleet's BatchNormAct" in workload.converted
    assert "DropPath -> fedfleet's Dropout" in workload.converted


def refusals(tmp_path: Path) -> list[tuple[Model, str]]:
    save_file({"conv1.0.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    (tmp_path / "no.safetensors").write_text("no")
    return [
        (Torchvision("resnet81"), "network must be one of .* of torchvision, got 'resnet81'; did you mean resnet"),
        (Torchvision("xyz"), "got 'xyz'; torchvision.list_models"),
        (Torchvision(SMALLEST, arguments={"weights": "DEFAULT"}), "arguments must not have weights: nothing is down"),
        (Torchvision(SMALLEST, arguments={"depth": 3}), r"shufflenet_v2_x0_5 does not take arguments=\{'depth': 3\}"),
        (Torchvision(SMALLEST, small=True), "small is for ResNets, which have conv1 and maxpool, got shuffle"),
        (Torchvision(SMALLEST, weights=str(tmp_path / "absent")), "weights must be a safetensors file, got .*absent"),
        (Torchvision(SMALLEST, weights=str(tmp_path / "no.safetensors")), "weights must be a safetensors file"),
        (Torchvision(SMALLEST, weights=str(tmp_path / "other.safetensors")), "got the shape .1,. for conv1.0.weight"),
    ]


def test_what_does_not_fit_is_refused(tmp_path: Path):
    for model, says in refusals(tmp_path):
        with pytest.raises(ValueError, match=says):
            outline(model)
    with pytest.raises(ValueError, match="needs inputs"):
        outline(Torchvision(SMALLEST), (64, 300))


def test_other_models_read_no_files():
    assert Digits(model=Logistic()).model.files() == {}
