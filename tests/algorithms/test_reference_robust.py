"""The references of robust aggregation and of attacks against the golden values and the identities of their sources."""

import itertools
import math

import numpy as np
import pytest

from tests.reference import byzantine, robust_mixing, robust_rules

A = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
B = np.array([[1.0, 2, 3], [-1, 4, -1], [2, 2, 3], [3, 1, 3]])
C = np.array([[0.0], [1], [3], [7], [12], [20], [1000]])
CORNERS = np.array([[0.0, 0], [1, 0], [0, 1]])
MEAN_IS_A_ROW = np.array([[0.0, 0], [3, 0], [-1, 0.1], [-1, -0.1], [-1, 0]])
TRUSTED = np.array([[2.0, 0], [1, 1], [-3, 0], [0, 5], [3, 4]])
SIGNS = np.outer([1, 1.1, 1.2, 1.3, -1, 0.01, 40], [1.0] * 7 + [-1.0] * 3)
FLOWER = np.array([[0.2] * 4, [0.7] * 4, [1.0] * 4])
SIX = np.array([[0.2], [0.5], [0.7], [12], [0.1], [0.1]])


def near(value, expected, tol=1e-9):
    np.testing.assert_allclose(value, expected, rtol=0, atol=tol)


def printed(value, expected):
    """Compare to 8 decimals, the precision in which the expected values are printed."""
    near(value, expected, 0.51e-8)


# ---------------------------------------------------------------- Golden values of rules

CALLS = {
    "mean": lambda x: robust_rules.mean(x),
    "median": lambda x: robust_rules.median(x),
    "trimmed": lambda x: robust_rules.trimmed_mean(x, 1),
    "meamed": lambda x: robust_rules.meamed(x, 1),
    "geometric": lambda x: robust_rules.geometric_median(x),
    "krum": lambda x: robust_rules.krum(x, 1),
    "krum -2": lambda x: robust_rules.krum(x, 1, "n-f-2"),
    "multi_krum": lambda x: robust_rules.multi_krum(x, 1),
    "mda": lambda x: robust_rules.mda(x, 1),
    "caf": lambda x: robust_rules.caf(x, 1),
    "centred": lambda x: robust_rules.centred_clipping(x, 100),
    "dnc": lambda x: robust_rules.dnc(x, 1, [range(x.shape[1])]),
}
GOLDEN = [
    *[("A", A, name, [4, 5, 6]) for name in ("mean", "median", "trimmed", "geometric", "centred", "caf")],
    *[("A", A, name, [2.5, 3.5, 4.5]) for name in ("meamed", "multi_krum", "mda")],
    ("A", A, "krum", [1, 2, 3]),
    ("B", B, "mean", [1.25, 2.25, 2]),
    ("B", B, "median", [1.5, 2, 3]),
    ("B", B, "trimmed", [1.5, 2, 3]),
    *[("B", B, name, [2, 5 / 3, 3]) for name in ("meamed", "multi_krum", "mda", "dnc")],
    ("B", B, "krum", [2, 2, 3]),
    ("B", B, "krum -2", [1, 2, 3]),
    ("C", C, "median", [7]),
    ("C", C, "trimmed", [8.6]),
    ("C", C, "meamed", [43 / 6]),
    ("C", C, "krum", [7]),
    ("C", C, "krum -2", [3]),
    ("C", C, "multi_krum", [43 / 6]),
    ("C", C, "mda", [43 / 6]),
    ("flower", FLOWER, "krum", [0.7] * 4),
]


@pytest.mark.parametrize(("rows", "x", "name", "expected"), GOLDEN, ids=lambda v: v if isinstance(v, str) else "")
def test_golden_values_of_rules(rows, x, name, expected):
    near(CALLS[name](x), expected)


def test_golden_values_with_other_settings():
    near(robust_rules.krum_scores(A, 1), [27, 27, 27])
    near(robust_rules.krum_scores(C, 1)[:6], [603, 523, 399, 295, 435, 1283])
    near(robust_rules.krum_scores(C, 1, "n-f-2")[:6], [203, 162, 110, 126, 291, 883])
    near(robust_rules.trimmed_mean(C, 2), 22 / 3)
    near(robust_rules.meamed(C, 2), 4.6)
    near(robust_rules.mda(C, 2), 4.6)
    near(robust_rules.multi_krum(C, 1, "n-f-2", keep=4), 2.75)
    for pair in itertools.combinations(range(3), 2):
        near(robust_rules.dnc(B, 1, [pair]), [2, 5 / 3, 3])
    near(robust_rules.trimmed_mean(np.array([[0.5], [1], [2], [100]]), 1), 1.5)
    near(robust_rules.trimmed_mean(np.array([[0.5], [1], [0.2], [0.5]]), 1), 0.5)
    near(robust_rules.multi_krum(np.array([[0.2], [0.5], [1.0]]), 1, keep=2), 0.35)


def test_golden_values_of_bulyan():
    assert C[robust_rules.bulyan_order(C, 1), 0].tolist() == [3, 7, 1, 12, 0]
    assert C[robust_rules.bulyan_order(C, 1, "n-f-1"), 0].tolist() == [7, 3, 12, 1, 0]
    near(robust_rules.bulyan(C, 1), 4 / 3)
    near(robust_rules.bulyan(C, 1, "n-f-1"), 4 / 3)
    printed(robust_rules.bulyan(SIX, 0), 2.26666667)


def test_golden_values_of_the_geometric_median():
    assert robust_rules.geometric_median(A).tolist() == [4, 5, 6]
    z = robust_rules.geometric_median(B)
    printed(z, [1.87752559, 1.96494193, 2.90948873])
    printed(4 * robust_rules.distance_sum(B, z), 7.78576094)
    z = robust_rules.geometric_median(CORNERS)
    near(z, [(3 - math.sqrt(3)) / 6] * 2)
    near(3 * robust_rules.distance_sum(CORNERS, z), (math.sqrt(6) + math.sqrt(2)) / 2)
    printed(robust_rules.geometric_median(MEAN_IS_A_ROW), [-0.94226497, 0])


def test_golden_values_of_clipping():
    near(robust_rules.centred_clipping(C, 5), 24 / 7)
    printed(robust_rules.centred_clipping(C, 5, iterations=3), 5.96209913)
    near(robust_rules.norm_clipping(C, 10), 41 / 7)
    near(robust_rules.mean(robust_mixing.clip(C, 10)), 41 / 7)


def test_golden_values_of_signs_trust_and_clusters():
    printed(robust_rules.fltrust(TRUSTED, np.array([1.0, 0])), [0.80620456, 0.42477444])
    assert robust_rules.sign_vote(np.array([[1.0, -1, 0], [2, -3, 1], [-1, 0, -1]]), 1.0).tolist() == [1, -1, 0]
    near(robust_rules.signguard(SIGNS, share=1.0), 1.075 * np.array([1.0] * 7 + [-1.0] * 3))
    merged, seen = robust_rules.clipped_clustering(B)
    printed(merged, [1.95961691, 1.65320564, 2.95961691])
    printed(np.median(seen), 4.18287316)


# ---------------------------------------------------------------- Golden values of pre-aggregations and attacks


def test_golden_values_of_preaggregations():
    near(robust_mixing.nnm(A, 1), [[2.5, 3.5, 4.5], [2.5, 3.5, 4.5], [5.5, 6.5, 7.5]])
    printed(
        robust_mixing.clip(A, 2),
        [
            [0.53452248, 1.06904497, 1.60356745],
            [0.91168461, 1.13960576, 1.36752692],
            [1.00514142, 1.14873305, 1.29232469],
        ],
    )
    printed(robust_mixing.arc(A, 1), [[1, 2, 3], [4, 5, 6], [4.41004009, 5.04004582, 5.67005155]])
    near(robust_rules.mean(robust_mixing.bucketing(A, range(3))), [4.75, 5.75, 6.75])
    near(robust_mixing.nnm(C, 2)[:, 0], [4.6] * 4 + [8.6] * 2 + [208.4])
    near(robust_rules.median(robust_mixing.nnm(C, 2)), 4.6)
    near(robust_mixing.arc(C, 2)[:, 0], [0, 1, 3, 7, 12, 12, 12])


def test_golden_values_of_attacks():
    near(byzantine.alie(A, 1.5, +1), [8.5, 9.5, 10.5])
    near(byzantine.ipm(A, 2), [-8, -10, -12])
    near(byzantine.sign_flip_of_mean(A), [-4, -5, -6])
    near(byzantine.mimic(A, 0), [1, 2, 3])
    for p in ("std", "sign"):
        near(byzantine.min_max(A, p), [1, 2, 3])
    near(byzantine.min_sum(A), [1, 2, 3])
    printed(byzantine.min_max(A, "unit"), [1.61581587, 2.01976984, 2.42372381])
    printed(
        byzantine.largest_gamma(A, byzantine.direction(A, "unit"), lambda v: byzantine.min_max_allows(A, v)), 5.2302827
    )
    printed(byzantine.min_sum(A, "unit"), [1.63137390, 2.03921737, 2.44706085])
    near(byzantine.gamma_min_sum(A, byzantine.direction(A, "unit")), 3 * math.sqrt(3))
    near(byzantine.min_sum(A, bound="min"), [4, 5, 6])


def against(rows):
    return robust_rules.trimmed_mean(robust_mixing.clip(robust_mixing.nnm(rows, 1), 2), 1)


def test_golden_values_of_optimal_attacks():
    sent, eps, error = byzantine.optimal_ipm(A, 1, against)
    near(eps, 10 * 0.8**12)
    printed(error, 6.78468261)
    printed(sent, [-2.74877907, -3.43597384, -4.12316860])
    sent, z, error = byzantine.optimal_alie(A, 1, against, sign=1)
    printed(z, 2.97328372)
    printed(error, 6.77786555)
    printed(sent, [12.91985116, 13.91985116, 14.91985116])


@pytest.mark.parametrize(
    ("rows", "count", "z"),
    [
        (10, 3, 0.1800),
        (17, 4, 0.2934),
        (20, 4, 0.1573),
        (20, 6, 0.3661),
        (25, 5, 0.2533),
        (50, 10, 0.2533),
        (50, 24, 1.4261),
        (60, 18, 0.4972),
        (100, 20, 0.2858),
        (10, 1, 0.0),
    ],
)
def test_z_max(rows, count, z):
    near(byzantine.z_max(rows, count), z, 0.51e-4)


def test_more_byzantine_clients_than_expected():
    for (clients, bad, cohort), tail in {
        (100, 20, 10): {2: 0.319, 3: 0.110, 4: 0.0255},
        (100, 20, 20): {4: 0.365, 6: 0.0637, 8: 0.00393, 9: 0.00065},
        (100, 30, 20): {6: 0.385, 8: 0.0885, 9: 0.0307},
        (1000, 200, 50): {10: 0.416, 15: 0.0274, 20: 0.00022},
    }.items():
        for k, expected in tail.items():
            digits = 10.0 ** -(2 - math.floor(math.log10(expected)))
            near(byzantine.more_than(clients, bad, cohort, k), expected, 0.55 * max(digits, 1e-5))


# ---------------------------------------------------------------- Identities

F = 2
EVERY = {
    "mean": lambda x: robust_rules.mean(x),
    "median": lambda x: robust_rules.median(x),
    "trimmed_mean": lambda x: robust_rules.trimmed_mean(x, F),
    "meamed": lambda x: robust_rules.meamed(x, F),
    "geometric_median": lambda x: robust_rules.geometric_median(x),
    "krum": lambda x: robust_rules.krum(x, F),
    "multi_krum": lambda x: robust_rules.multi_krum(x, F),
    "bulyan": lambda x: robust_rules.bulyan(x, F),
    "mda": lambda x: robust_rules.mda(x, F),
    "caf": lambda x: robust_rules.caf(x, F),
    "dnc": lambda x: robust_rules.dnc(x, F, [range(x.shape[1])]),
}
ROTATED = {name: EVERY[name] for name in ("mean", "geometric_median", "krum", "multi_krum", "mda", "caf", "dnc")} | {
    "centred_clipping": lambda x: robust_rules.centred_clipping(x, iterations=2),
    "norm_clipping": lambda x: robust_rules.norm_clipping(x),
    "arc": lambda x: robust_rules.mean(robust_mixing.arc(x, F)),
    "nnm": lambda x: (
        robust_rules.median(robust_mixing.nnm(x, F)) * 0 + robust_rules.geometric_median(robust_mixing.nnm(x, F))
    ),
}
TOLERANT = ("median", "trimmed_mean", "meamed", "geometric_median", "krum", "multi_krum", "mda", "caf")


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(1).normal(size=(11, 6))


@pytest.mark.parametrize("name", EVERY)
def test_rules_follow_translation_scale_and_negation(rows, name):
    rule, shift = EVERY[name], np.linspace(-3, 3, 6)
    near(rule(rows + shift), rule(rows) + shift)
    near(rule(rows * 7), rule(rows) * 7)
    near(rule(-rows), -rule(rows))


@pytest.mark.parametrize("name", ROTATED)
def test_rules_of_distances_follow_rotation(rows, name):
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0]
    near(ROTATED[name](rows @ turn), ROTATED[name](rows) @ turn)


@pytest.mark.parametrize("name", sorted({*EVERY, *ROTATED} - {"bulyan"}))
def test_the_order_of_rows_is_of_no_account(rows, name):
    rule = {**EVERY, **ROTATED}[name]
    near(rule(rows[np.random.default_rng(3).permutation(11)]), rule(rows))


@pytest.mark.parametrize("name", TOLERANT)
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "after nnm"])
def test_equal_rows_outvote_any_f(name, mixed):
    x = np.vstack([np.tile([1.5, -2.25, 3.0], (9, 1)), [[1e9, 0, 7], [-4, 1e6, 1e-3]]])[
        np.random.default_rng(4).permutation(11)
    ]
    near(EVERY[name](robust_mixing.nnm(x, F) if mixed else x), [1.5, -2.25, 3.0], 1e-8)


def test_the_mean_after_nnm_is_not_robust():
    x = np.vstack([np.zeros((9, 1)), [[1e9], [1e9]]])
    assert abs(robust_rules.mean(robust_mixing.nnm(x, F))[0]) > 1e6


def test_medians_are_trimmed_means(rows):
    assert np.array_equal(robust_rules.median(rows), robust_rules.trimmed_mean(rows, 5))
    near(robust_rules.median(rows[:10]), robust_rules.trimmed_mean(rows[:10], 4))
    assert all(robust_rules.median(rows)[p] in rows[:, p] for p in range(6))
    assert any(np.array_equal(robust_rules.krum(rows, F), row) for row in rows)
    column = rows[:, :1]
    assert robust_rules.geometric_median(column)[0] == robust_rules.median(column)[0]


def test_settings_with_which_rules_are_the_mean(rows):
    middle = rows.mean(axis=0)
    near(robust_rules.multi_krum(rows, F, keep=11), middle)
    near(robust_rules.mean(robust_mixing.bucketing(rows, range(11), 11)), middle)
    near(robust_rules.mean(robust_mixing.clip(rows, math.inf)), middle)
    for rule in (robust_rules.trimmed_mean, robust_rules.meamed, robust_rules.mda, robust_rules.caf):
        near(rule(rows, 0), middle)


def test_one_broken_row_does_no_harm(rows):
    honest = rows[:10]
    for size in (1e30, math.inf, math.nan):
        x, f, broken = robust_rules.without_broken(np.vstack([honest, np.full((1, 6), size)]), F)
        assert (len(x), f, broken) == ((11, F, 0) if size == 1e30 else (10, F - 1, 1))
        for rule in (
            robust_rules.median,
            robust_rules.trimmed_mean,
            robust_rules.meamed,
        ):
            out = rule(x) if rule is robust_rules.median else rule(x, f)
            assert np.all((honest.min(axis=0) <= out) & (out <= honest.max(axis=0)))
        assert np.isfinite(robust_rules.geometric_median(x)).all()


def bounds(size, f):
    r = f / (size - 2 * f)
    kappa = {
        "trimmed_mean": 6 * r * (1 + r),
        "krum": 6 * (1 + r),
        "geometric_median": 4 * (1 + r) ** 2,
        "median": 4 * (1 + r) ** 2,
    }
    return kappa, {name: 8 * f / (size - f) * (k + 1) for name, k in kappa.items()}


@pytest.mark.parametrize(("size", "f"), [(5, 1), (7, 2)])
def test_robustness_bounds_hold(size, f):
    """|F(x) - mean over T|^2 <= kappa times the variance over T, for every T of S - f rows."""
    rng = np.random.default_rng(5)
    rules = {
        "trimmed_mean": lambda x: robust_rules.trimmed_mean(x, f),
        "krum": lambda x: robust_rules.krum(x, f),
        "geometric_median": lambda x: robust_rules.geometric_median(x, tol=1e-9),
        "median": robust_rules.median,
    }
    alone, mixed = bounds(size, f)
    for _ in range(15):
        x = rng.normal(size=(size, 2)) * rng.choice([0.1, 1, 10], size=(size, 1))
        for name, rule in rules.items():
            for kappa, out in ((alone[name], rule(x)), (mixed[name], rule(robust_mixing.nnm(x, f)))):
                for chosen in itertools.combinations(range(size), size - f):
                    part = x[list(chosen)]
                    spread = np.mean(np.sum((part - part.mean(axis=0)) ** 2, axis=1))
                    assert np.sum((out - part.mean(axis=0)) ** 2) <= kappa * spread * (1 + 1e-6)


def test_zeros_outvote_ones():
    x = np.array([[0.0], [1], [0], [0], [1], [0], [0]])
    for name in TOLERANT:
        assert EVERY[name](x)[0] == 0


def test_gammas_in_closed_form(rows):
    for p in (byzantine.direction(rows, kind) for kind in ("std", "unit", "sign")):
        near(
            byzantine.largest_gamma(rows, p, lambda v: byzantine.min_max_allows(rows, v)),
            byzantine.gamma_min_max(rows, p),
        )
        for bound in ("max", "min"):
            found = byzantine.largest_gamma(rows, p, lambda v, b=bound: byzantine.min_sum_allows(rows, v, b))
            near(found, byzantine.gamma_min_sum(rows, p, bound))


def test_the_search_finds_a_maximum_that_it_passes():
    t, value = byzantine.search(lambda t: -((t - 30) ** 2))
    assert t == 30
    assert value == 0


def test_variations_do_what_their_names_say(rows):
    rng = np.random.default_rng(6)
    middle = rows.mean(axis=0)
    noise = byzantine.signguard_noise(rows, rng.uniform(0.1, 1, 6), rng.permutation(6), match="norm")
    assert sorted(np.sign(noise)) == sorted(np.sign(middle))
    near(np.linalg.norm(noise), np.median(np.linalg.norm(rows, axis=1)))
    out = byzantine.directed(rows, rng.uniform(size=6))
    assert np.all(np.where(middle > 0, out <= rows.min(axis=0), out >= rows.max(axis=0)))
    sent = byzantine.byz_mean(rows, 5)
    near(np.vstack([rows, sent]).mean(axis=0), byzantine.alie(rows, 0.5))
    assert len(sent) == 5
    half = byzantine.half_negated_alie(rows)
    near(half[:3], byzantine.alie(rows, 1.5, +1)[:3])
    near(half[3:], byzantine.alie(rows, 1.5)[3:])
    assert np.all(byzantine.half_negated_min_max(rows)[3:] < middle[3:])
    assert np.all(byzantine.half_negated_min_max(rows)[:3] > middle[:3])
    assert byzantine.label_flip([0, 3, 9], 10).tolist() == [9, 6, 0]


def test_mimic_keeps_its_target_after_the_warm_up(rows):
    rng = np.random.default_rng(7)
    attack = byzantine.MimicWarmUp(rng.normal(size=6), warmup=3)
    targets = [attack.target(rows + 3 * rng.normal(size=(11, 6))) for _ in range(5)]
    assert targets[1] == targets[2] == targets[3] == targets[4]
    near(np.linalg.norm(attack.z), 1)


def test_model_replacement_and_its_trigger():
    own = np.array([3.0, 4.0])
    assert byzantine.backdoor_scale(own, 20, 4, 0.5) == 10
    assert byzantine.backdoor_scale(own, 20, 4, 0.5, bound=15) == 3
    image = byzantine.trigger(np.zeros((1, 1, 8, 8)), 5, 2.0)
    assert image.sum() == 50
    assert image[0, 0, 4, 4] == 2
    assert image[0, 0, 5, 5] == 0
