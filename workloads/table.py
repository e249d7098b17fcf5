"""Tables of data sets, models and partitions that experiments choose by name. Light: importing it imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Where a part is, and one line on what it is."""

    build: str
    summary: str


_HERE = "fedfleet.workloads."

WORKLOADS = {
    "digits": Part(_HERE + "digits:Digits", "scikit-learn's digits, 8 x 8, 10 classes; shipped, no download"),
    "fashion_mnist": Part(_HERE + "fashion_mnist:FashionMnist", "FashionMNIST, 28 x 28, 10 classes; from data_root"),
    "quadratic": Part(_HERE + "quadratic:Quadratic", "heterogeneous quadratics with a known optimum"),
}

MODELS = {
    "logistic": Part(_HERE + "models:Logistic", "one linear layer"),
    "mlp": Part(_HERE + "models:Mlp", "linear layers with ReLU, widths by hidden"),
    "lenet": Part(_HERE + "models:LeNet", "LeNet-5 with ReLU and max pooling"),
}

PARTITIONS = {
    "iid": Part(_HERE + "partitions:Iid", "equal parts at random"),
    "dirichlet": Part(_HERE + "partitions:Dirichlet", "label skew: classes cut by Dirichlet(beta) proportions"),
    "shards": Part(_HERE + "partitions:Shards", "label skew: rows sorted by label, per_client shards each"),
}
