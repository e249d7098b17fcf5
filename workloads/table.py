"""Tables of the workloads, models, adapters and partitions that experiments choose by name. Importing it does not
import torch."""

from __future__ import annotations

from .entry import Entry

_HERE = "fedfleet.workloads."

WORKLOADS = {
    "digits": Entry(_HERE + "data.digits:Digits", "scikit-learn's digits, 8 x 8, 10 classes; no download"),
    "fashion_mnist": Entry(
        _HERE + "data.fashion_mnist:FashionMnist", "FashionMNIST, 28 x 28, 10 classes; from data_root"
    ),
    "mnist": Entry(_HERE + "data.mnist:Mnist", "MNIST, 28 x 28, 10 classes, by writer; from data_root"),
    "cifar10": Entry(_HERE + "data.cifar:Cifar10", "CIFAR-10, 32 x 32 colour, 10 classes; from data_root"),
    "cifar100": Entry(_HERE + "data.cifar:Cifar100", "CIFAR-100, 32 x 32 colour, 100 classes; from data_root"),
    "svhn": Entry(_HERE + "data.svhn:Svhn", "SVHN, 32 x 32 colour, 10 classes; from data_root, needs scipy"),
    "tiny_imagenet": Entry(
        _HERE + "data.tiny_imagenet:TinyImagenet", "Tiny ImageNet, 64 x 64 colour, 200 classes; from data_root"
    ),
    "femnist": Entry(
        _HERE + "data.femnist:Femnist", "FEMNIST, 28 x 28, 62 classes, by writer; LEAF's files in data_root"
    ),
    "shakespeare": Entry(
        _HERE + "data.shakespeare:Shakespeare", "the next of 79 characters, by speaking role; LEAF's files in data_root"
    ),
    "characters": Entry(
        _HERE + "data.characters:Characters", "your own texts as characters: predict the next one, for language models"
    ),
    "roles": Entry(
        _HERE + "data.roles:Roles",
        "the lines of Shakespeare's roles, by role: predict the next token; shakespeare_roles.parquet in data_root",
    ),
    "causal_lm": Entry(
        _HERE + "data.language:CausalLm",
        "your own texts as tokens of any tokeniser: predict the next one, for language models",
    ),
    "instruct": Entry(
        _HERE + "data.instruct:Instruct", "your own prompts and answers, or chats, to tune language models on"
    ),
    "text_classes": Entry(
        _HERE + "data.text_classes:TextClasses", "your own texts with a class for each, for pretrained models"
    ),
    "sst2": Entry(_HERE + "data.sentiment:Sst2", "SST-2, sentiment of sentences; from data_root"),
    "sentiment140": Entry(_HERE + "data.sentiment:Sentiment140", "Sentiment140, tweets, by user; from data_root"),
    "yelp": Entry(_HERE + "data.sentiment:Yelp", "Yelp reviews, by business category; from data_root"),
    "imdb": Entry(_HERE + "data.sentiment:Imdb", "IMDB film reviews; from data_root"),
    "table": Entry(
        _HERE + "data.table:Table",
        "your own table: CSV, JSON lines, Parquet, Arrow, Hugging Face, pictures in folders of classes",
    ),
    "parquet_text": Entry(_HERE + "data.sentiment:ParquetText", "your own Parquet files: texts, labels, clients"),
    "idx": Entry(_HERE + "data.idx_files:IdxFiles", "your own idx files, the format of MNIST: images, labels"),
    "quadratic": Entry(_HERE + "problems.quadratic:Quadratic", "heterogeneous quadratics with a known optimum", ""),
    "linear": Entry(
        _HERE + "problems.regression:Linear",
        "linear regression in 1,000 unknowns, one solution for all clients",
        "training",
    ),
    "logistic": Entry(
        _HERE + "problems.regression:Synthetic", "synthetic classes; clients differ by alpha (labels) and beta (inputs)"
    ),
    "noisy": Entry(_HERE + "wrappers.noisy:Noisy", "another workload (of) with noise in gradients, labels or inputs"),
    "feature_skew": Entry(
        _HERE + "wrappers.feature_skew:FeatureSkew",
        "another workload (of) whose images each client sees turned, blurred, brighter or with a cast of colour",
    ),
    "label_noise": Entry(
        _HERE + "wrappers.label_noise:LabelNoise", "another workload (of) with wrong labels, at a rate of each client"
    ),
    "calibrated": Entry(
        _HERE + "wrappers.calibrated:Calibrated",
        "another workload (of) whose logits are calibrated by each client's classes: FedLC, balanced softmax",
    ),
    "regularised": Entry(_HERE + "wrappers.regularised:Regularised", "another workload (of) with coupled weight decay"),
    "auc": Entry(
        _HERE + "problems.auc:Auc", "min-max: AUC of one class against the rest, over a classification workload (of)"
    ),
    "robust": Entry(
        _HERE + "problems.robust:Robust", "min-max: adversarial weights of classes, over a classification workload (of)"
    ),
    "label_flipped": Entry(
        _HERE + "wrappers.poisoned:LabelFlipped", "another workload (of) in which some clients' labels are flipped"
    ),
    "gradients_flipped": Entry(
        _HERE + "wrappers.poisoned:GradientsFlipped",
        "another workload (of) in which some clients' gradients are negated",
    ),
    "backdoored": Entry(
        _HERE + "wrappers.poisoned:Backdoored", "another workload (of) in which some clients' rows have a trigger"
    ),
    "saddle": Entry(
        _HERE + "problems.saddle:Saddle", "min-max: heterogeneous quadratics with a known saddle; PL with copies", ""
    ),
}

MODELS = {
    "logistic": Entry(_HERE + "models.small:Logistic", "one linear layer"),
    "mlp": Entry(_HERE + "models.small:Mlp", "linear layers with ReLU; hidden: their widths"),
    "lenet": Entry(_HERE + "models.small:LeNet", "LeNet-5 with ReLU and max pooling"),
    "cnn4": Entry(_HERE + "models.convolutional:Cnn4", "4 convolutions, 32 to 256 channels, BatchNorm"),
    "cnn8": Entry(_HERE + "models.convolutional:Cnn8", "8 convolutions, 32 to 256 channels, BatchNorm"),
    "cnn10": Entry(_HERE + "models.convolutional:Cnn10", "10 convolutions, 32 to 512 channels, BatchNorm"),
    "femnist_cnn": Entry(
        _HERE + "models.convolutional:FemnistCnn", "2 convolutions and a linear layer of 128, for FEMNIST"
    ),
    "resnet18": Entry(
        _HERE + "models.convolutional:ResNet18", "ResNet-18 with GroupNorm or BatchNorm and the stem for CIFAR"
    ),
    "torchvision": Entry(
        _HERE + "models.published:Torchvision", "a network of torchvision by its name, such as resnet18; no download"
    ),
    "timm": Entry(_HERE + "models.published:Timm", "a network of timm by its name; pip install timm; no download"),
    "vit": Entry(_HERE + "models.transformer:Vit", "vision transformer, 6 layers of 8 heads on patches of 4 x 4"),
    "gpt": Entry(_HERE + "models.gpt:Gpt", "a small language model: a decoder of a transformer, for characters"),
    "pretrained": Entry(
        _HERE + "models.pretrained:Pretrained",
        "a language model of transformers from a local folder; pip install fedfleet[text]; no download",
    ),
    "rnn": Entry(_HERE + "models.recurrent:Rnn", "tanh cells over a text, maximum over time, 300 -> 4096 -> classes"),
    "lstm": Entry(_HERE + "models.recurrent:Lstm", "LSTM cells over a text, last output"),
}

ADAPTERS = {
    "lora": Entry(_HERE + "models.adapters:Lora", "LoRA: trained factors of low rank beside frozen weights"),
}

PARTITIONS = {
    "iid": Entry(_HERE + "partitions.standard:Iid", "equal parts at random"),
    "contiguous": Entry(_HERE + "partitions.standard:Contiguous", "equal parts of consecutive rows"),
    "dirichlet": Entry(
        _HERE + "partitions.standard:Dirichlet", "label skew: each class is divided by Dirichlet(beta) proportions"
    ),
    "shards": Entry(
        _HERE + "partitions.standard:Shards", "label skew: rows sorted by label, per_client shards for each client"
    ),
    "dirichlet_prior": Entry(
        _HERE + "partitions.skew:DirichletPrior",
        "label skew: each client draws Dirichlet(beta) proportions; equal sizes, or those of sizes",
    ),
    "labels": Entry(
        _HERE + "partitions.skew:Labels",
        "label skew: per_client labels for each client, least used first or as in NIID-Bench",
    ),
    "quantity": Entry(_HERE + "partitions.sizes:Quantity", "size skew: shares of all rows drawn from Dirichlet(beta)"),
    "lognormal": Entry(_HERE + "partitions.sizes:LogNormal", "size skew: sizes in proportion to exp(sigma z)"),
    "power_law": Entry(_HERE + "partitions.sizes:PowerLaw", "size skew: the r-th largest client has r^-exponent"),
    "natural": Entry(
        _HERE + "partitions.natural:Natural", "the natural clients of the data set: writers, roles, users"
    ),
    "domains": Entry(
        _HERE + "partitions.natural:Domains", "feature skew: each client has rows of one domain, a value of a column"
    ),
    "drifting": Entry(
        _HERE + "partitions.drifting:Drifting", "another partition (of) whose clients train on a window that moves"
    ),
    "positive_ratio": Entry(
        _HERE + "partitions.skew:PositiveRatio", "rare positives: their share among all rows, or for each client"
    ),
}
