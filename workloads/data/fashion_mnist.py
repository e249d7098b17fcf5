"""FashionMNIST: 28 x 28 grey images of clothing, 60,000 train and 10,000 test. Xiao et al. 2017, arXiv:1708.07747."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..models.small import LeNet
from ..partitions.standard import Iid
from ..workload import Model, Partition
from .idx import File, Idx, IdxSet

PUBLISHED = IdxSet(
    "FashionMNIST",
    "fashion_mnist",
    {
        "train-images-idx3-ubyte": File("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 16 + 60_000 * 784),
        "train-labels-idx1-ubyte": File("25c81989df183df01b3e8a0aad5dffbe", 8 + 60_000),
        "t10k-images-idx3-ubyte": File("bef4ecab320f06d8554ea6380940ec79", 16 + 10_000 * 784),
        "t10k-labels-idx1-ubyte": File("bb300cfdad3c16e7a12a480ee83cd310", 8 + 10_000),
    },
)


@dataclass(frozen=True)
class FashionMnist(Idx):
    """Inputs are normalised by .2860 and .3530, the statistics of the training set. Some published code normalises test
    images by those of the test set, .2868 and .3524."""

    model: Model = LeNet()
    partition: Partition = Iid()

    published: ClassVar[IdxSet] = PUBLISHED
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
