"""Slow, independent low-rank federated methods: numpy float64, one client after another, one dict of arrays each.

Written from the methods' equations alone; shares no code with the engine. `gradient`, `cohorts`, `steps` and `rule` as
in `methods`; `forms[layer]` says how a layer is made of factors (`lowrank`, `kronecker`), layers without a form are
trained whole; `draw(r, i, layer, name, shape)` gives the random numbers of client i (None: the server's, which all
share) first used in round r; `weights(r, i)` need not add up to one, None means all alike.

    fedmud   Li et al. 2025, sections 3.1 and 3.2; couple="aad" section 3.3; couple="frozen" section 5.3
    fedlmt   Liu et al. 2024
    fedhm    Yao et al. 2021, arXiv:2111.14655
    fedpara  Hyeon-Woo et al. 2022, arXiv:2108.06098

`codecs` holds EF21-P and FedBAT, `ranks` the sizes that a compression ratio leads to.
"""

from typing import NamedTuple

import numpy as np

from tests.reference.trees import add, copy, times


class Factored(NamedTuple):
    """After each round.

    x        the model to evaluate, with all layers
    trained  what clients train, averaged, before any merge: "layer.U" or the layer's name -> array
    frozen   the weights W of the layers with a form, after any merge; {} where there are none
    clients  what every client of the cohort sent, in the cohort's order
    """

    x: list
    trained: list
    frozen: list
    clients: list


def shares(weights, r, cohort):
    """Weights of a cohort, adding up to one."""
    raw = [1.0 if weights is None else float(weights(r, i)) for i in cohort]
    return [w / sum(raw) for w in raw]


def weighted(trees, parts):
    total = times(trees[0], parts[0])
    for tree, part in zip(trees[1:], parts[1:], strict=True):
        total = add(total, tree, part)
    return total


def visit(oracle, start, count, rule, expand, back):
    """`count` local steps; `expand(p)` is the model of the trained p, `back(p, g)` the gradient of p."""
    p, state = copy(start), rule.start(start)
    for k in range(count):
        p, state = rule.step(p, back(p, oracle(expand(p), k)), state)
    return p


def factors(p, layer, form, shape):
    return [p[f"{layer}.{name}"] for name in form.shapes(shape)]


def whole(x, forms):
    """The layers of x without a form."""
    return {name: np.array(value) for name, value in x.items() if name not in forms}


def draw_all(draw, r, x, forms):
    """Random numbers for every factor of every layer."""
    return {
        f"{layer}.{name}": np.array(draw(r, None, layer, name, size), dtype=np.float64)
        for layer, form in forms.items()
        for name, size in form.shapes(x[layer].shape).items()
    }


# ---------------------------------------------------------------- Factors instead of weights


def direct(p, shapes, forms):
    """Order of x; layers with a form are the product of their factors."""
    return {
        name: forms[name].product(*factors(p, name, forms[name], shape), shape) if name in forms else p[name]
        for name, shape in shapes.items()
    }


def direct_back(p, g, shapes, forms, frobenius):
    """The gradient of the factors; `frobenius` adds that of frobenius |W|_F^2 in the layers with a form."""
    out = {name: value for name, value in g.items() if name not in forms}
    for layer, form in forms.items():
        parts = factors(p, layer, form, shapes[layer])
        full = g[layer] + 2 * frobenius * form.product(*parts, shapes[layer])
        for name, value in zip(form.shapes(shapes[layer]), form.back(full, *parts), strict=True):
            out[f"{layer}.{name}"] = value
    return out


def factored(gradient, x0, cohorts, steps, rule, forms, draw, weights, server_lr, frobenius):
    """FedAvg of factors that stand for the weights; of x0's layers with a form only the shape counts."""
    shapes = {name: value.shape for name, value in x0.items()}
    p, path = draw_all(draw, 0, x0, forms) | whole(x0, forms), Factored([], [], [], [])
    for r, cohort in enumerate(cohorts):
        sent = [
            visit(
                lambda x, k, i=i, r=r: gradient(i, x, r, k),
                p,
                steps[r, i],
                rule,
                lambda p: direct(p, shapes, forms),
                lambda p, g: direct_back(p, g, shapes, forms, frobenius),
            )
            for i in cohort
        ]
        p = add(p, add(weighted(sent, shares(weights, r, cohort)), p, -1.0), server_lr)
        path.x.append(direct(p, shapes, forms))
        path.trained.append(p)
        path.frozen.append({})
        path.clients.append(sent)
    return path


def fedlmt(gradient, x0, clients, cohorts, steps, rule, forms, draw, weights=None, server_lr=1.0, frobenius=0.0):
    """W = U V^T in all rounds, U and V are averaged separately. Forms: `Matrix(rank, "permuted")`; both factors are
    drawn."""
    return factored(gradient, x0, cohorts, steps, rule, forms, draw, weights, server_lr, frobenius)


def fedpara(gradient, x0, clients, cohorts, steps, rule, forms, draw, weights=None, server_lr=1.0):
    """W = W1 * W2 in all rounds, all factors are averaged separately. Forms: `HadamardTensor`, `HadamardMatrix`; all
    factors are drawn."""
    return factored(gradient, x0, cohorts, steps, rule, forms, draw, weights, server_lr, 0.0)


def fedhm(gradient, x0, clients, cohorts, steps, rule, forms, weights=None, frobenius=0.0):
    """Down: the truncated SVD of W; clients train U and V; W <- sum w_i U_i V_i^T. Forms: `Matrix(rank, "permuted")`.

    `trained` of the result is what the server sent in that round; `x` the recovered W.
    """
    x, path = copy(x0), Factored([], [], [], [])
    shapes = {name: value.shape for name, value in x0.items()}
    for r, cohort in enumerate(cohorts):
        down = whole(x, forms)
        for layer, form in forms.items():
            down[f"{layer}.U"], down[f"{layer}.V"] = form.split(x[layer])
        sent = [
            visit(
                lambda x, k, i=i, r=r: gradient(i, x, r, k),
                down,
                steps[r, i],
                rule,
                lambda p: direct(p, shapes, forms),
                lambda p, g: direct_back(p, g, shapes, forms, frobenius),
            )
            for i in cohort
        ]
        x = weighted([direct(p, shapes, forms) for p in sent], shares(weights, r, cohort))
        path.x.append(x)
        path.trained.append(down)
        path.frozen.append({layer: x[layer] for layer in forms})
        path.clients.append(sent)
    return path


# ---------------------------------------------------------------- Factors of the change of the weights


def redraw(draw, r, x, forms, couple, init):
    """(trained, fixed) factors at a reset: products are zero unless init="random"."""
    trained, fixed = {}, {}
    for layer, form in forms.items():
        for name, size in form.shapes(x[layer].shape).items():
            key = f"{layer}.{name}"
            if couple == "aad":
                trained[key] = np.zeros(size)
                fixed[key] = np.array(draw(r, None, layer, f"fixed {name}", size), dtype=np.float64)
            elif name == "V" and init == "zero":
                trained[key] = np.zeros(size)
            else:
                into = fixed if couple == "frozen" and name == "U" else trained
                into[key] = np.array(draw(r, None, layer, name, size), dtype=np.float64)
    return trained, fixed


def change(layer, form, shape, couple, trained, fixed):
    """U V^T; U V~^T + U~ V^T; U~ V^T. For blocks the product is the Kronecker product."""
    u, v = f"{layer}.U", f"{layer}.V"
    if couple == "mud":
        return form.product(trained[u], trained[v], shape)
    if couple == "frozen":
        return form.product(fixed[u], trained[v], shape)
    return form.product(trained[u], fixed[v], shape) + form.product(fixed[u], trained[v], shape)


def change_back(layer, form, g, couple, trained, fixed):
    u, v = f"{layer}.U", f"{layer}.V"
    if couple == "mud":
        return dict(zip((u, v), form.back(g, trained[u], trained[v]), strict=True))
    from_v = form.back(g, fixed[u], trained[v])[1]
    if couple == "frozen":
        return {v: from_v}
    return {u: form.back(g, trained[u], fixed[v])[0], v: from_v}


def changed(p, x, forms, couple, fixed):
    """The model: W plus its change in layers with a form, p itself in the others; in the order of x."""
    return {
        name: value + change(name, forms[name], value.shape, couple, p, fixed) if name in forms else p[name]
        for name, value in x.items()
    }


def changed_back(p, g, forms, couple, fixed):
    out = {name: value for name, value in g.items() if name not in forms}
    for layer, form in forms.items():
        out |= change_back(layer, form, g[layer], couple, p, fixed)
    return out


def fedmud(
    gradient,
    x0,
    clients,
    cohorts,
    steps,
    rule,
    forms,
    draw,
    couple="mud",
    reset=1,
    init="zero",
    weights=None,
    server_lr=1.0,
):
    """W frozen, factors of its change trained and averaged; every `reset` rounds W <- W + change, new factors.

    couple: "mud" trains U and V from (drawn, 0), or both drawn with init="random"; "aad" trains U = V = 0 against the
    drawn "fixed U" and "fixed V"; "frozen" keeps the drawn U and trains V = 0. Forms: `Matrix`, `Blocks`.
    """
    if couple not in ("mud", "aad", "frozen") or init not in ("zero", "random"):
        raise ValueError((couple, init))
    x, path = copy(x0), Factored([], [], [], [])
    trained, fixed = redraw(draw, 0, x, forms, couple, init)
    p = trained | whole(x, forms)
    for r, cohort in enumerate(cohorts):
        sent = [
            visit(
                lambda y, k, i=i, r=r: gradient(i, y, r, k),
                p,
                steps[r, i],
                rule,
                lambda p, x=x, fixed=fixed: changed(p, x, forms, couple, fixed),
                lambda p, g, fixed=fixed: changed_back(p, g, forms, couple, fixed),
            )
            for i in cohort
        ]
        p = add(p, add(weighted(sent, shares(weights, r, cohort)), p, -1.0), server_lr)
        path.x.append(changed(p, x, forms, couple, fixed))
        path.trained.append(p)
        path.clients.append(sent)
        if (r + 1) % reset == 0:
            x = changed(p, x, forms, couple, fixed)
            trained, fixed = redraw(draw, r + 1, x, forms, couple, init)
            p = trained | whole(x, forms)
        path.frozen.append({layer: x[layer] for layer in forms})
    return path


def aggregation_error(sent, parts, layer, form, shape):
    """sum w_i P(U_i, V_i) - P(sum w_i U_i, sum w_i V_i), written as the covariance of the factors around their mean."""
    u, v = f"{layer}.U", f"{layer}.V"
    mean_u = sum(w * p[u] for w, p in zip(parts, sent, strict=True))
    mean_v = sum(w * p[v] for w, p in zip(parts, sent, strict=True))
    return sum(w * form.product(p[u] - mean_u, p[v] - mean_v, shape) for w, p in zip(parts, sent, strict=True))
