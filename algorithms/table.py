"""The tables of methods and parts that experiments choose by name. Importing this module imports no torch.

A plug-in is any module with tables like these; docs/howto/plugins.md has the names of all tables. A value is a
callable, or an entry that says where the callable is and, in one line, what it is.
"""

from __future__ import annotations

from typing import NamedTuple

from ..workloads.entry import Entry


class Recipe(NamedTuple):
    """A method. `build`: where its recipe is; `paper`: authors and year. The costs are counted in trees of the model's
    size: `state` that a client keeps between rounds, `down` and `up` per client and round, `gradients` per local step.
    Among the costs "ratio" is the method's argument, a share of a tree, and "places" are packed indices of entries.
    `family`: the title under which it is listed."""

    build: str
    summary: str
    paper: str
    state: str
    down: str
    up: str
    gradients: str
    family: str


_HERE = "fedfleet.algorithms."


def _family(family: str, *rows: tuple[str, str, str, str]) -> dict[str, Recipe]:
    """name -> recipe; a method's module and its recipe are called like the method."""
    return {
        name: Recipe(f"{_HERE}{name}:{name}", summary, paper, *costs.split(" | "), family=family)
        for name, summary, paper, costs in rows
    }


OF_ADAPTERS = "Adapters"
"""The family of the methods that need a model with adapters."""

METHODS = {
    **_family(
        "Averaging",
        # name, summary, paper, "state | down | up | gradients"
        ("fedavg", "local steps of any rule, then the mean", "McMahan et al. 2017", "0 | 1 | 1 | 1"),
        ("local_sgdm", "local momentum SGD; models and momenta are averaged", "Yu et al. 2019", "0 | 2 | 2 | 1"),
        (
            "local_adaalter",
            "local Adagrad; models and sums of squared gradients are averaged",
            "Xie et al. 2019",
            "0 | 2 | 2 | 1",
        ),
        ("fedprox", "local steps that are pulled back to the server's model", "Li et al. 2020", "0 | 1 | 1 | 1"),
        ("fednova", "unequal numbers of local steps weigh alike", "Wang et al. 2020", "0 | 1 | 1 | 1"),
    ),
    **_family(
        "Drift of unlike clients",
        ("scaffold", "control variates cancel client drift", "Karimireddy et al. 2020", "1 | 2 | 2 | 1"),
        ("feddyn", "a proximal term that moves with the client", "Acar et al. 2021", "1 | 1 | 1 | 1"),
        ("feddc", "FedDyn with control variates", "Gao et al. 2022", "2 | 2 | 2 | 1"),
        ("fedadmm", "models and dual variables stay on the clients", "Gong et al. 2022", "2 | 1 | 1 | 1"),
        ("mifa", "the server uses the last update of every client", "Gu et al. 2021", "1 | 1 | 1 | 1"),
    ),
    **_family(
        "A model for each client",
        ("local_only", "every client trains a model of its own, nothing is sent", "Li et al. 2021", "1 | 0 | 0 | 1"),
        ("ditto", "own models that are pulled towards the server's", "Li et al. 2021", "1 | 1 | 1 | 2"),
        ("pfedme", "own models from inner problems, which move the server's", "Dinh et al. 2020", "1 | 1 | 1 | 5"),
        ("per_fedavg", "a model from which one own step leads far", "Fallah et al. 2020", "0 | 1 | 1 | 1"),
        ("apfl", "own models are mixed with the server's", "Deng et al. 2020", "1 + scalar | 1 | 1 | 2"),
    ),
    **_family(
        "Clusters of clients",
        ("ifca", "k models, every client trains the one that fits it", "Ghosh et al. 2020", "0 | 2 | 1 + scalar | 1"),
        ("cfl", "clusters of clients are cut in two by their updates", "Sattler et al. 2021", "0 | 1 + scalar | 1 | 1"),
    ),
    **_family(
        "Fairness",
        ("qffl", "clients with large losses count more", "Li et al. 2020", "0 | 1 | 1 + scalar | 1"),
    ),
    **_family(
        "Shared momentum and variance reduction",
        (
            "fedavg_m",
            "local steps along a momentum that all clients share",
            "Cheng et al. 2024",
            "0 | 2 | 1 + scalar | 1",
        ),
        ("fedcm", "local steps along the cohort's last mean gradient", "Xu et al. 2021", "0 | 2 | 1 + scalar | 1"),
        ("fedavg_vr", "FedAvg-M with variance reduction", "Cheng et al. 2024", "0 | 3 | 1 + scalar | 2"),
        ("scaffold_m", "SCAFFOLD with a shared momentum", "Cheng et al. 2024", "1 | 2 | 2 + scalar | 1"),
        ("scaffold_vr", "SCAFFOLD-M with variance reduction", "Cheng et al. 2024", "1 | 3 | 2 + scalar | 2"),
        ("padamfed", "SCAFFOLD-M with step sizes from S, K and R alone", "Yan et al. 2025", "1 | 2 | 2 + scalar | 1"),
        ("padamfed_vr", "PAdaMFed with variance reduction", "Yan et al. 2025", "1 | 3 | 3 + scalar | 2"),
        (
            "stem",
            "STORM estimators on the clients, which are averaged",
            "Khanduri et al. 2021",
            "1 + scalar | 2 + scalar | 2 | 2",
        ),
        (
            "fafed",
            "STEM with an Adam preconditioner that all clients share",
            "Wu et al. 2023",
            "1 + scalar | 3 + scalar | 3 | 2",
        ),
    ),
    **_family(
        "Flat minima",
        ("fedsam", "local steps towards flat minima; FedASAM", "Qu et al. 2022", "0 | 1 | 1 | 2"),
        ("mofedsam", "FedSAM along a momentum that all clients share", "Qu et al. 2022", "0 | 2 | 1 + scalar | 2"),
    ),
    **_family(
        "Adaptive servers",
        ("fedavgm", "FedAvg with momentum on the server", "Hsu et al. 2019", "0 | 1 | 1 | 1"),
        ("fedadagrad", "Adagrad on the server", "Reddi et al. 2021", "0 | 1 | 1 | 1"),
        ("fedadam", "Adam on the server", "Reddi et al. 2021", "0 | 1 | 1 | 1"),
        ("fedyogi", "Yogi on the server", "Reddi et al. 2021", "0 | 1 | 1 | 1"),
        (
            "fedexp",
            "the server extrapolates along the mean displacement",
            "Jhunjhunwala et al. 2023",
            "0 | 1 | 1 + scalar | 1",
        ),
        ("fedexp_m", "FedExP with momentum on the server", "Jhunjhunwala et al. 2023", "0 | 1 | 1 + scalar | 1"),
        ("feddu_adagrad", "FedExP in the metric of Adagrad", "Takakura et al. 2025", "0 | 1 | 1 + scalar | 1"),
        ("feddu_adam", "FedExP-M in the metric of Adam", "Takakura et al. 2025", "0 | 1 | 1 + scalar | 1"),
    ),
    **_family(
        "Heavy-tailed noise",
        ("avg_biclip", "BiClip steps on the clients, then the mean", "Lee et al. 2025", "0 | 1 | 1 | 1"),
        ("adagrad_biclip", "BiClip steps on the clients, Adagrad on the server", "Lee et al. 2025", "0 | 1 | 1 | 1"),
        ("rmsprop_biclip", "BiClip steps on the clients, RMSProp on the server", "Lee et al. 2025", "0 | 1 | 1 | 1"),
        ("adam_biclip", "BiClip steps on the clients, Adam on the server", "Lee et al. 2025", "0 | 1 | 1 | 1"),
        ("bi2clip", "BiClip steps on the clients and on the server", "Lee et al. 2025", "0 | 1 | 1 | 1"),
    ),
    **_family(
        "Muon",
        ("local_muon", "Muon on each client's own momentum, then the mean", "Takezawa et al. 2025", "1 | 1 | 1 | 1"),
        ("fedmuon_bc", "Muon on bias-corrected momenta", "Takezawa et al. 2025", "1 | 2 | 2 | 1"),
        ("fedmuon_ma", "Muon; models and momenta are averaged", "Zhang, Gao 2025", "0 | 2 + scalar | 2 | 1"),
    ),
    **_family(
        "Few and long rounds",
        (
            "diloco",
            "AdamW whose state clients keep, Nesterov momentum on the server",
            "Douillard et al. 2023",
            "2 | 1 | 1 | 1",
        ),
        (
            "muloco",
            "Muon whose state clients keep, Nesterov momentum on the server",
            "Therien et al. 2025",
            "1 to 2 | 1 | 1 | 1",
        ),
        (
            "streaming_diloco",
            "DiLoCo that exchanges one fragment of the model at a time, while training goes on",
            "Douillard et al. 2025",
            "3 | fragment | fragment, 4 bits | 1",
        ),
        (
            "eager_diloco",
            "DiLoCo whose means arrive one round late, each worker's newest change put in",
            "Kale et al. 2025",
            "5 | 1 | 1 | 1",
        ),
        ("data_parallel", "gradients at one model, and AdamW on the server", "McMahan et al. 2017", "0 | 1 | 1 | 1"),
        (
            "sparse_loco",
            "AdamW whose state clients keep, the largest changes in two bits with error feedback",
            "Sarfi et al. 2025",
            "3 | 1 | ratio + places | 1",
        ),
    ),
    **_family(
        "Min-max problems",
        ("local_sgda", "min-max: local descent-ascent, then the mean", "Deng, Mahdavi 2021", "0 | 1 | 1 | 1"),
        (
            "local_sgdam",
            "min-max: local descent-ascent with averaged momenta",
            "Sharma et al. 2022",
            "0 | 2 + scalar | 2 | 1",
        ),
        (
            "fed_sgda_m",
            "min-max: local descent-ascent with averaged STORM estimators",
            "Wu et al. 2023",
            "0 | 2 + scalar | 2 | 2",
        ),
        ("sagda", "min-max: local descent-ascent with control variates", "Yang et al. 2022", "1 | 2 | 2 | 1"),
        (
            "fess_gda",
            "min-max: local descent-ascent, the server smooths the primal",
            "Shen et al. 2024",
            "0 | 1 | 1 | 1",
        ),
        ("fed_nsgda_m", "min-max: normalised steps, momentum and control variates", "Zhang, Gao 2025", "1 | 2 | 2 | 1"),
        ("fedmuon_da", "min-max: Muon's steps, momentum and control variates", "Zhang, Gao 2025", "1 | 2 | 2 | 1"),
        ("fed_sgda_clip", "min-max: clipped steps, momentum and control variates", "Zhang, Gao 2025", "1 | 2 | 2 | 1"),
    ),
    **_family(
        OF_ADAPTERS,
        (
            "flora",
            "products of all clients' factors are added to the weights, new factors begin",
            "Wang et al. 2024",
            "weights | factors of the cohort | factors | 1",
        ),
        (
            "fedex_lora",
            "means of factors, and the weights take what their product misses",
            "Singhal et al. 2024",
            "weights | factors + factors of the cohort | factors | 1",
        ),
    ),
    **_family(
        "Low rank and compression",
        ("fedmud", "low-rank updates of frozen weights", "Li et al. 2025", "1 | ratio + scalar | ratio | 1"),
        ("fedmud_bkd", "updates of Kronecker blocks", "Li et al. 2025", "1 | ratio + scalar | ratio | 1"),
        (
            "fedmud_aad",
            "low-rank updates that are averaged exactly",
            "Li et al. 2025",
            "1 | ratio + scalar | ratio | 1",
        ),
        (
            "fedmud_bkd_aad",
            "updates of Kronecker blocks that are averaged exactly",
            "Li et al. 2025",
            "1 | ratio + scalar | ratio | 1",
        ),
        ("fedmud_f", "low-rank updates with one factor frozen", "Li et al. 2025", "1 | ratio + scalar | ratio | 1"),
        (
            "fedmud_bkd_f",
            "updates of Kronecker blocks with one factor frozen",
            "Li et al. 2025",
            "1 | ratio + scalar | ratio | 1",
        ),
        ("fedhm", "truncated singular value decompositions are sent down", "Yao et al. 2021", "0 | ratio | ratio | 1"),
        ("fedlmt", "weights are low-rank products", "Liu et al. 2024", "0 | ratio | ratio | 1"),
        (
            "fedpara",
            "weights are entrywise products of low-rank matrices",
            "Hyeon-Woo et al. 2022",
            "0 | ratio | ratio | 1",
        ),
        (
            "ef21_p",
            "random entries are sent up, the largest ones down",
            "Gruntkowska et al. 2023",
            "1 | ratio + places | ratio + scalar | 1",
        ),
        ("fedbat", "one learned bit per weight is sent up", "Li et al. 2024", "0 | 1 | 1/32 + scalars | 1"),
    ),
}

RULES = {
    "sgd": Entry(_HERE + "parts.rules:Sgd", "y - lr v"),
    "momentum": Entry(_HERE + "parts.rules:Momentum", "heavy ball, Nesterov optional"),
    "adam": Entry(_HERE + "parts.rules:Adam", "Adam with bias correction"),
    "adamw": Entry(_HERE + "parts.rules:adamw", "Adam with decoupled weight decay"),
    "muon": Entry(_HERE + "parts.muon:muon", "orthogonalised momentum on matrices, a rule of its own on vectors"),
    "lmo": Entry(_HERE + "parts.muon:lmo", "step along a norm's ball: spectral, euclidean or max; no momentum"),
    "normalised": Entry(_HERE + "parts.rules:Normalised", "y - lr v / |v|"),
    "clip": Entry(_HERE + "parts.rules:Clip", "another rule on v clipped to a radius"),
    "biclip": Entry(_HERE + "parts.biclip:BiClip", "v with magnitudes kept between two thresholds"),
    "muon_adamw": Entry(_HERE + "parts.muon_adamw:muon_adamw", "Muon on hidden matrices, AdamW on the rest"),
    "groups": Entry(_HERE + "parts.split:grouped", "another rule, with other numbers for tensors of some names"),
}

COMPRESSIONS = {
    "updates": Entry(_HERE + "parts.compression:updates", "factored updates of frozen weights, as in FedMUD"),
    "factors": Entry(_HERE + "parts.compression:factors", "weights that are low-rank products, as in FedLMT"),
    "hadamard": Entry(
        _HERE + "parts.compression:hadamard", "weights that are entrywise low-rank products, as in FedPara"
    ),
    "decomposition": Entry(_HERE + "fedhm:Decomposition", "truncated decompositions of weights, as in FedHM"),
    "sparsification": Entry(_HERE + "ef21_p:Sparsification", "some entries each way, as in EF21-P"),
    "binarisation": Entry(_HERE + "fedbat:Binarisation", "one bit per weight with learned scales, as in FedBAT"),
    "coded": Entry(_HERE + "parts.coded:Coding", "codes of what clients have moved, with error feedback or EF21"),
}

_CODECS = _HERE + "parts.quantisers:"

CODECS = {
    "identity": Entry(_HERE + "parts.codecs:Identity", "the numbers as they are"),
    "cast": Entry(_CODECS + "Cast", "bfloat16 or float16"),
    "linear": Entry(_CODECS + "Linear", "equal steps from the smallest to the largest number"),
    "statistical": Entry(_CODECS + "Statistical", "bins over six standard deviations, each with its own mean"),
    "absmax": Entry(_CODECS + "AbsMax", "equal steps from minus to plus the largest magnitude"),
    "sign": Entry(_CODECS + "Sign", "signs, times the mean magnitude"),
    "qsgd": Entry(_CODECS + "Qsgd", "random multiples of the norm, unbiased"),
    "natural": Entry(_CODECS + "Natural", "random powers of two, unbiased"),
    "e3m0": Entry(_CODECS + "E3m0", "powers of two below the largest magnitude, in 4 bits"),
    "top_k": Entry(_CODECS + "Largest", "the largest magnitudes of a tensor, and their places"),
    "sparse": Entry(_CODECS + "SparseChunks", "the largest magnitudes of every chunk, in a few bits, and their places"),
}

BALLS = {
    "newton_schulz": Entry(_HERE + "parts.muon:NewtonSchulz", "0 to 10 iterations, coefficients by scheme"),
    "svd": Entry(_HERE + "parts.muon:Svd", "exact"),
    "schatten": Entry(
        _HERE + "parts.muon:Schatten", "exact, for Schatten's norm of order p in place of the spectral one"
    ),
    "identity": Entry(_HERE + "parts.muon:Identity", "no orthogonalisation"),
}

_AGGREGATION = _HERE + "aggregation."

AGGREGATORS = {
    "mean": Entry(_AGGREGATION + "contract:Mean", "the mean of the messages"),
    "median": Entry(_AGGREGATION + "median:Median", "the median of each coordinate"),
    "trimmed_mean": Entry(_AGGREGATION + "trimmed_mean:TrimmedMean", "f values left out on each side of a coordinate"),
    "meamed": Entry(_AGGREGATION + "meamed:Meamed", "the mean of the S - f values nearest to the median"),
    "geometric_median": Entry(
        _AGGREGATION + "geometric_median:GeometricMedian", "the point with the least sum of distances to the messages"
    ),
    "krum": Entry(_AGGREGATION + "krum:Krum", "the message that is closest to its neighbours"),
    "multi_krum": Entry(_AGGREGATION + "krum:MultiKrum", "the mean of the messages that are closest to others"),
    "bulyan": Entry(_AGGREGATION + "bulyan:Bulyan", "selection by Krum, then the mean around the median"),
    "mda": Entry(_AGGREGATION + "mda:Mda", "the mean of the S - f messages of least diameter"),
    "centred_clipping": Entry(
        _AGGREGATION + "centred_clipping:CentredClipping", "bounded steps from the last answer towards the messages"
    ),
    "norm_clipping": Entry(_AGGREGATION + "norm_clipping:NormClipping", "the mean of messages of bounded norm"),
    "caf": Entry(_AGGREGATION + "caf:Caf", "rows lose weight along the direction of largest variance"),
    "sign_vote": Entry(_AGGREGATION + "sign_vote:SignVote", "the majority of signs in each coordinate"),
    "fltrust": Entry(_AGGREGATION + "fltrust:FlTrust", "weights by the cosine with a trusted update"),
    "dnc": Entry(_AGGREGATION + "dnc:Dnc", "messages that stand out along a singular vector are left out"),
    "signguard": Entry(_AGGREGATION + "signguard:SignGuard", "ordinary norms, and signs in the largest cluster"),
    "clipped_clustering": Entry(
        _AGGREGATION + "clipped_clustering:ClippedClustering", "the larger of two clusters by angle, norms bounded"
    ),
}

PREAGGREGATORS = {
    "nnm": Entry(_AGGREGATION + "nnm:Nnm", "every message becomes the mean of those nearest to it"),
    "bucketing": Entry(_AGGREGATION + "bucketing:Bucketing", "means of s messages in a random order"),
    "clip": Entry(_AGGREGATION + "clip:ClipRows", "messages of bounded norm"),
    "arc": Entry(_AGGREGATION + "arc:Arc", "messages shortened to the norm of one of the longest"),
}

_PRIVACY = _HERE + "privacy."

MECHANISMS = {
    "gaussian": Entry(_PRIVACY + "gaussian:Gaussian", "independent noise in every round"),
    "tree": Entry(_PRIVACY + "binary_tree:BinaryTree", "noise of a binary tree over the rounds"),
    "banded": Entry(_PRIVACY + "banded:Banded", "noise that takes back that of the rounds before"),
    "banded_inverse": Entry(_PRIVACY + "banded:BandedInverse", "the same with a banded inverse, which keeps nothing"),
}

_ATTACKS = _HERE + "attacks."

ATTACKS = {
    "label_flip": Entry(_ATTACKS + "poisoning:LabelFlip", "data: label l becomes C - 1 - l"),
    "backdoor": Entry(_ATTACKS + "poisoning:Backdoor", "data with a trigger, and a message that is scaled"),
    "sign_flip": Entry(
        _ATTACKS + "sign_flip:sign_flip", "-k times the own message, the mean of the honest ones, or each gradient"
    ),
    "gaussian": Entry(_ATTACKS + "gaussian:gaussian", "random messages"),
    "noise": Entry(_ATTACKS + "noise:Noise", "the own message with noise"),
    "zero": Entry(_ATTACKS + "constant:Zero", "a message of zeros"),
    "infinite": Entry(_ATTACKS + "constant:Infinite", "infinity in every coordinate"),
    "nan": Entry(_ATTACKS + "constant:NotANumber", "not a number in every coordinate"),
    "drop": Entry(_ATTACKS + "drop:Drop", "no message"),
    "ipm": Entry(_ATTACKS + "ipm:Ipm", "-epsilon times the mean of the honest messages"),
    "alie": Entry(_ATTACKS + "alie:Alie", "the mean of the honest messages, moved by z standard deviations"),
    "mimic": Entry(_ATTACKS + "mimic:mimic", "the message of one honest client"),
    "min_max": Entry(_ATTACKS + "min_max:MinMax", "as far from the mean as honest messages are from each other"),
    "min_sum": Entry(_ATTACKS + "min_max:MinSum", "the same for sums of squared distances"),
    "optimal_ipm": Entry(_ATTACKS + "optimal:OptimalIpm", "ipm with the factor that harms the rule most"),
    "optimal_alie": Entry(_ATTACKS + "optimal:OptimalAlie", "alie with the factor that harms the rule most"),
    "signguard_noise": Entry(_ATTACKS + "signguard_noise:SignGuardNoise", "noise with the mean's counts of signs"),
    "half_negated": Entry(_ATTACKS + "half_negated:half_negated", "alie or min_max, negated on half the coordinates"),
    "directed": Entry(_ATTACKS + "directed:Directed", "beyond the honest range, against the sign of the mean"),
    "byz_mean": Entry(_ATTACKS + "byz_mean:ByzMean", "messages that make the mean of all a given poor one"),
}
